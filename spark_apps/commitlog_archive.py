"""Keep room in the ``cdc_raw`` of a queue's nodes: move finished commit logs to the object store, for ``sync.run_s`` s.

Run by the DAG ``commitlog_archive``, a task for each queue, on a host that can read the nodes' folders. It needs
neither Spark nor the rest of the sync, and goes on while that is stopped. Exit code 1: a node has too little room, or
its folder cannot be looked at; the report says why.
"""

import argparse
import sys
from collections.abc import Sequence

from ringsync.steps.application import run_application
from ringsync.steps.archive import commitlog_archive


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--queue", default="default", metavar="NAME", help="queue whose nodes are watched")


def main(argv: Sequence[str]) -> int:
    return run_application(
        *("commitlog_archive", __doc__, commitlog_archive.run, argv),
        options=_options,
        of_table=False,
        lasting=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
