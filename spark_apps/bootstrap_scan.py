"""Read a table by token ranges into the replica, and publish its rows to the change stream as op ``r``.

Run by the DAG ``bootstrap_table`` with the plan that ``bootstrap_prepare`` wrote for the same run.
"""

import sys
from collections.abc import Sequence

from ringsync.steps.application import run_application
from ringsync.steps.bootstrap import scan as bootstrap_scan


def main(argv: Sequence[str]) -> int:
    return run_application("bootstrap_scan", __doc__, bootstrap_scan.run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
