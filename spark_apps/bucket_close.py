"""Publish staged rows for ``sync.run_s`` seconds: messages to the streams, images to the replicas.

Run by the DAG ``bucket_close``, one at a time; two at once do no harm.
"""

import sys
from collections.abc import Sequence

from ringsync.steps.application import run_application
from ringsync.steps.close import bucket_close


def main(argv: Sequence[str]) -> int:
    return run_application("bucket_close", __doc__, bucket_close.run, argv, of_table=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
