"""Check everything a bootstrap needs and write its plan; touches no data.

Run by the DAG ``bootstrap_table``; by hand: ``spark-submit spark_apps/bootstrap_prepare.py --help``.
"""

import argparse
import sys
from collections.abc import Sequence

from ringsync.steps import bootstrap_prepare
from ringsync.steps.application import run_application


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--splits", type=int, metavar="N", help="number of splits, instead of by estimated size")
    parser.add_argument("--dry-run", action="store_true", help="only check and forecast")


def main(argv: Sequence[str]) -> int:
    return run_application("bootstrap_prepare", __doc__, bootstrap_prepare.run, argv, _options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
