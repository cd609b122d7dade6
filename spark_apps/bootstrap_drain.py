"""Put the changes that were made while a table was copied after the copied rows in the stream.

Run by the DAG ``bootstrap_table`` after ``bootstrap_scan``.
"""

import argparse
import sys
from collections.abc import Sequence

from ringsync.steps.application import run_application
from ringsync.steps.bootstrap import drain as bootstrap_drain


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--last", action="store_true", help="no step follows: fail if a table has failed in any step")


def main(argv: Sequence[str]) -> int:
    return run_application("bootstrap_drain", __doc__, bootstrap_drain.run, argv, _options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
