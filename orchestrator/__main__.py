"""`python -m orchestrator`, as in `ray job submit -- python -m orchestrator train ...`: the `slotwise` command."""

import sys

from orchestrator.cli import main

if __name__ == "__main__":
    sys.exit(main())
