"""The sums of several tables, of which one kills the worker that reads it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle

from ringsync.config import load_config
from ringsync.cql.identifiers import parse_table_patterns
from ringsync.steps.application import Application, ExitCode, Report
from ringsync.steps.replica import checksums, verify
from ringsync.wiring import store_of

pytestmark = [pytest.mark.server, pytest.mark.spark]

TABLES = 6
POISON = TABLES // 3
PIECES = 2
"""Pieces of a table: one of each side."""


@dataclass(frozen=True)
class DeadlyTask(checksums.ChecksumTask):
    """Dies of the first piece of a table, once all pieces of the others have ended."""

    log: str = ""

    def sum_up(self, piece: Any) -> None:
        if (piece.plan.table.name, piece.place) == (f"t{POISON}", 0):
            until = time.monotonic() + 60
            while time.monotonic() < until and len(self.ended()) < (TABLES - 1) * PIECES:
                time.sleep(0.05)
            os._exit(137)
        super().sum_up(piece)
        with Path(self.log).open("a") as log:
            log.write(f"ended {piece.plan.table.name} {piece.place}\n")

    def ended(self) -> list[str]:
        lines = Path(self.log).read_text().splitlines() if Path(self.log).exists() else []
        return [line for line in lines if f" t{POISON} " not in line]


def test_what_has_ended_is_not_read_again_when_a_table_kills_a_worker(
    session: Any,
    keyspace: str,
    spark: Any,
    lake: Path,
    bootstrap: Callable[[str, str], Report],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers know no tests
    for number in range(TABLES):
        session.execute(f"CREATE TABLE {keyspace}.t{number} (k int PRIMARY KEY, v int)")
        for k in range(number + 1):
            session.execute(f"INSERT INTO {keyspace}.t{number} (k, v) VALUES ({k}, {k}) USING TIMESTAMP 1000")
        bootstrap(f"{keyspace}.t{number}", f"sums-{number}")
    log = tmp_path / "log"
    monkeypatch.setattr(checksums, "ChecksumTask", partial(DeadlyTask, log=str(log)))
    path = lake / "ringsync.yaml"
    config = load_config(path)
    given = argparse.Namespace(repair=False, table=f"{keyspace}.*")
    patterns = parse_table_patterns(given.table)
    application = Application("replica_verify", str(path), config, store_of(config), None, "sums", given, patterns)
    report, code = verify.run(application)
    assert code == ExitCode.COMPLETED_WITH_ERRORS
    assert report["failed"].keys() == {f"{keyspace}.t{POISON}"}
    assert "compares only this table fails" in report["failed"][f"{keyspace}.t{POISON}"]["error"]
    rows = {name: one["rows"] for name, one in report["tables"].items()}
    assert rows == {f"{keyspace}.t{number}": number + 1 for number in range(TABLES) if number != POISON}
    times = Counter(line for line in log.read_text().splitlines() if f" t{POISON} " not in line)
    assert len(times) == (TABLES - 1) * PIECES
    assert set(times.values()) == {1}
