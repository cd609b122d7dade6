"""Check everything a bootstrap needs, begin or continue it, and write the run's plan; copy no data.

Run by the DAG ``bootstrap_table``; by hand: ``spark-submit spark_apps/bootstrap_prepare.py --help``.
"""

import argparse
import sys
from collections.abc import Sequence

from ringsync.cql.identifiers import parse_column_names
from ringsync.ring.tokens import parse_token_range
from ringsync.steps.application import run_application
from ringsync.steps.bootstrap import prepare as bootstrap_prepare


def _options(parser: argparse.ArgumentParser) -> None:
    modes = ("token_range", "sstable")
    parser.add_argument("--mode", choices=modes, help="where the rows are read (default: scan.mode)")
    parser.add_argument("--splits", type=int, metavar="N", help="number of splits (default: by estimated size)")
    parser.add_argument("--columns", type=parse_column_names, metavar="NAME,…", help="value columns to copy")
    parser.add_argument("--token-range", type=parse_token_range, metavar="START:END", help="tokens to copy")
    parser.add_argument("--where", metavar="CQL", help="condition on key columns")
    parser.add_argument("--restart", action="store_true", help="do not continue an earlier bootstrap")
    parser.add_argument("--enable-cdc", action="store_true", help="ALTER the table, so that its changes are logged")
    parser.add_argument("--dry-run", action="store_true", help="only check and forecast")


def main(argv: Sequence[str]) -> int:
    return run_application("bootstrap_prepare", __doc__, bootstrap_prepare.run, argv, _options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
