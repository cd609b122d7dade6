"""Take the snapshots of a queue's nodes that a bootstrap with mode ``sstable`` reads, and copy them to the store.

Run by the DAG ``bootstrap_table`` after ``bootstrap_prepare``, a task for each queue, on a host that reaches the nodes'
management interface and their data directories. It needs no Spark. With mode ``token_range`` it does nothing.
"""

import argparse
import sys
from collections.abc import Sequence

from ringsync.steps.application import run_application
from ringsync.steps.bootstrap import snapshot as sstable_snapshot


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bootstrap-run", required=True, metavar="ID", help="id of the run that bootstrap_prepare had")
    parser.add_argument("--queue", default="default", metavar="NAME", help="queue whose nodes are looked at")


def main(argv: Sequence[str]) -> int:
    return run_application("sstable_snapshot", __doc__, sstable_snapshot.run, argv, _options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
