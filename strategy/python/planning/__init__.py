"""weft.strategy.planning: how plans, rules and layouts are read, and which style they give each module.

`plan_text.py` and `layout.py` do not import torch; `weft estimate` reads its configuration with them.
"""
