"""Run the command line as ``python -m fxshard``."""

import sys

from fxshard.cli import main

if __name__ == "__main__":
    sys.exit(main())
