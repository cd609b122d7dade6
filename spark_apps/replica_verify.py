"""Compare source and replica cell by cell (value, writetime, TTL); with ``--repair`` correct the replica.

Run by the DAGs ``bootstrap_table`` and ``replica_verify``. Exit code 1: differences were found and, with ``--repair``,
not all could be corrected.
"""

import argparse
import sys
from collections.abc import Sequence

from ringsync.steps.application import run_application
from ringsync.steps.replica import verify as replica_verify


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repair", action="store_true", help="re-read the differing token ranges and compare again")
    due = "compare only tables that the sync follows, of large ones only the token ranges that are due"
    parser.add_argument("--due", action="store_true", help=due)


def main(argv: Sequence[str]) -> int:
    return run_application("replica_verify", __doc__, replica_verify.run, argv, _options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
