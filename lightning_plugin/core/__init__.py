"""The behaviour of weft's strategies in every Lightning namespace, without importing any of them.

`lightning` and `pytorch_lightning` hold the same code twice, as different classes, and either may be
absent. The behaviour is therefore in mixins, and `weft._plugin.factory` joins them to the classes of a
namespace. Start reading at `trainer_mixin.py`.
"""
