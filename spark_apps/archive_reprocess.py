"""Read archived commit logs: their rows are staged, or published as late rows, and the logs move to ``cdc_archive/``.

Run by the DAG ``archive_reprocess``; any host can do it. With ``--since`` and ``--until`` logs with writes of this
interval are read again, too. Exit code 1: logs are left that cannot be read; the report says why.
"""

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

from ringsync.steps.application import run_application
from ringsync.steps.archive import archive_reprocess


def _ms(text: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write 2026-11-01T12:00Z") from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--since", type=_ms, metavar="TIME", help="first write time of an interval, e.g. 2026-11-01T12:00Z"
    )
    parser.add_argument("--until", type=_ms, default=2**62, metavar="TIME", help="first write time after it")


def main(argv: Sequence[str]) -> int:
    return run_application("archive_reprocess", __doc__, archive_reprocess.run, argv, options=_options, of_table=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
