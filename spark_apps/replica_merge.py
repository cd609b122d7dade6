"""Merge the newest row images into the bases of the replicas.

Run by the DAG ``replica_merge``. Without ``--table`` it merges every table that is due. Exit code 1: some table could
not be merged; the report says why.
"""

import argparse
import sys
from collections.abc import Sequence

from ringsync.steps.application import run_application
from ringsync.steps.replica import merge as replica_merge


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--table", metavar="KEYSPACE.TABLE", help="merge this table now (default: all that are due)")


def main(argv: Sequence[str]) -> int:
    return run_application("replica_merge", __doc__, replica_merge.run, argv, _options, of_table=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
