"""Stage the changes that the nodes of a worker queue have logged, for ``sync.run_s`` seconds.

Run by the DAG ``commitlog_stage`` of each queue, on a worker that can read these nodes' ``cdc_raw``.
"""

import argparse
import sys
from collections.abc import Sequence

from ringsync.steps.application import run_application
from ringsync.steps.stage import commitlog_stage


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--queue", default="default", metavar="NAME", help="worker queue whose nodes are read")


def main(argv: Sequence[str]) -> int:
    return run_application("commitlog_stage", __doc__, commitlog_stage.run, argv, _options, of_table=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
