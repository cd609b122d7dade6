"""Publish late rows: rows that came after their bucket had closed. Each is read from all replicas and published once.

Run by the DAG ``out_of_sequence`` for ``sync.run_s`` seconds at a time. Exit code 1: some rows cannot be published; the
report says which and why.
"""

import sys
from collections.abc import Sequence

from ringsync.steps.application import run_application
from ringsync.steps.late import out_of_sequence


def main(argv: Sequence[str]) -> int:
    return run_application("out_of_sequence", __doc__, out_of_sequence.run, argv, of_table=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
