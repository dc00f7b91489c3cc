"""weft.strategy.planning: how plans, rules and layouts are read, and which style each module gets by them.

`plan_text.py` and `layout.py` do not import torch; `weft estimate` reads its configuration with them.
"""
