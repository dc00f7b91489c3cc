"""`python -m weft` is the command `weft`."""

import importlib
import sys

if __name__ == "__main__":
    sys.exit(importlib.import_module("weft_command").main())
