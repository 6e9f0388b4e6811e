"""`python -m ncclcomm`: the `ncclcomm` command."""

from __future__ import annotations

import sys

from ncclcomm.cli import main

if __name__ == "__main__":
    sys.exit(main())
