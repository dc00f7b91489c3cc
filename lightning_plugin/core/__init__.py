"""The behaviour of weft's strategies in every Lightning namespace; imports none of the namespaces.

`lightning` and `pytorch_lightning` contain the same code with distinct classes, and either may be absent. The behaviour
is therefore in mixins, which `weft._plugin.factory` combines with the classes of a namespace, and in an engine and its
parts, which the mixins call. Start reading at `factory.py` and `engine.py`.
"""
