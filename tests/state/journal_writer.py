"""The process that test_journal.py kills: appends to a journal for ever."""

import itertools
import sys
from pathlib import Path

from state.journal import Journal

journal = Journal(Path(sys.argv[1]), "actor/0")
for number in itertools.count():
    journal.append("a", number=number, text="x" * (number % 977))
    if number == 0:
        print("writing", flush=True)
