"""`python -m mdn`: the command `mdn` from a checkout that is not installed."""

import sys

from mdn.cli import main

if __name__ == "__main__":
    sys.exit(main())
