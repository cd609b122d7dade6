"""A bootstrapped table is altered in every way: the replica follows, and Cassandra's own rows are what it must show."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringsync.cluster.schema import read_table
from ringsync.replica import evolve
from ringsync.replica.evolve import RewriteNeededError
from ringsync.steps.application import ExitCode, Report
from tests.replica.bases import state_of

pytestmark = [pytest.mark.server, pytest.mark.spark]


def test_verification_after_every_change(
    session: Any, keyspace: str, bootstrap: Callable[[str, str], Report], step: Any, lake: Path
) -> None:
    name = f"{keyspace}.altered"
    session.execute(f"CREATE TYPE {keyspace}.part (a int)")
    session.execute(
        f"CREATE TABLE {name} (id int, line int, v text, u {keyspace}.part, l list<frozen<{keyspace}.part>>, "
        "PRIMARY KEY (id, line)) WITH cdc = true"
    )
    long_ago_us = int(time.time() * 1_000_000) - 60_000_000
    for i in range(20):
        session.execute(
            f"INSERT INTO {name} (id, line, v, u, l) VALUES ({i}, {i}, 'old', {{a: {i}}}, [{{a: 1}}]) "
            f"USING TTL {90_000 + i} AND TIMESTAMP {long_ago_us}"
        )
        # A time of its own.
        session.execute(f"UPDATE {name} USING TIMESTAMP {long_ago_us + 1} SET u.a = {i} WHERE id = {i} AND line = {i}")
    bootstrap(name, "altered")

    def verified(run: str, **options: Any) -> tuple[int, int, ExitCode]:
        report, code = step("replica_verify", name, run, **options)
        return report["differences"], report["replica_rows"], code

    session.execute(f"ALTER TABLE {name} ADD (n int, s text static, tags set<text>)")
    session.execute(f"ALTER TYPE {keyspace}.part ADD b text")
    assert verified("added") == (0, 20, ExitCode.OK)
    values = "(id, line, n, s, tags, l) VALUES (1, 1, 5, 's', {'t'}, [{a: 1, b: 'b'}])"
    session.execute(f"INSERT INTO {name} {values} USING TIMESTAMP {long_ago_us + 2}")
    differences, *_ = verified("written")
    assert differences > 0
    assert verified("mended", repair=True) == (0, 20, ExitCode.OK)

    session.execute(f"ALTER TABLE {name} DROP v")
    assert verified("dropped") == (0, 20, ExitCode.OK)
    session.execute(f"ALTER TABLE {name} ADD v text")
    session.execute(f"UPDATE {name} SET v = 'new' WHERE id = 2 AND line = 2")
    session.execute(f"ALTER TABLE {name} RENAME line TO place")
    with pytest.raises(RewriteNeededError, match="the key column line was renamed to place"):
        step("replica_verify", name, "waits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evolve, "begin_changes", lambda *_: None)  # killed before the second commit
        merged, code = step("replica_merge", name, "rewritten")
    assert (merged["merged"][name]["rewritten"]["rows"], code) == (20, ExitCode.OK)
    assert state_of(lake, read_table(session, keyspace, "altered")).changes_version < 0
    assert step("replica_merge", name, "begun")[1] == ExitCode.OK
    assert state_of(lake, read_table(session, keyspace, "altered")).changes_version >= 0
    report, code = step("replica_verify", name, "renamed")
    rows = {outcome: number for outcome, number in report["rows_of_differing_ranges"].items() if number}
    rows.pop("equal", None)
    assert (rows, report["replica_rows"], code) == ({"changed_after": 1}, 20, ExitCode.OK)
    assert state_of(lake, read_table(session, keyspace, "altered")).base_rows == 20
