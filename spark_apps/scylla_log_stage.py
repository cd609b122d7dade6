"""Stage the changes in the CDC logs of a ScyllaDB cluster, for ``sync.run_s`` seconds.

Run by the DAG ``scylla_log_stage``, one at a time. The logs are tables: any worker that reaches the cluster can
read them.
"""

import sys
from collections.abc import Sequence

from ringsync.steps.application import run_application
from ringsync.steps.scylla import scylla_log_stage


def main(argv: Sequence[str]) -> int:
    return run_application("scylla_log_stage", __doc__, scylla_log_stage.run, argv, of_table=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
