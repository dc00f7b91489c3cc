"""`python -m weft_command` is the command `weft` of an environment whose scripts are not on the path."""

import sys

from weft_command import main

if __name__ == "__main__":
    sys.exit(main())
