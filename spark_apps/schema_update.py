"""Keep the history of all tables and publish schema changes, for ``sync.run_s`` seconds.

Run by the DAG ``schema_updater``, one at a time; two at once do no harm. Exit code 1: the history of a table, or a
message, is held up; the report says why.
"""

import sys
from collections.abc import Sequence

from ringsync.steps import schema_update
from ringsync.steps.application import run_application


def main(argv: Sequence[str]) -> int:
    return run_application("schema_update", __doc__, schema_update.run, argv, of_table=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
