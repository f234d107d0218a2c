"""`python -m paxserve` is the `paxserve` command."""

import sys

from paxserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
