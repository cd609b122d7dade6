"""Whoever leaves ringsync has a cluster that captures nothing, and knows what is left."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from ringsync.cli import main
from ringsync.cluster.node import one_node
from ringsync.config import load_config
from ringsync.service import leave
from ringsync.service.look import look
from ringsync.service.published import Waited
from ringsync.status import STOP_KEY
from ringsync.steps.bootstrap import enable_cdc
from ringsync.steps.loop import put_status
from ringsync.storage.local import LocalStore
from servers.cassandra import CassandraNode
from tests.chaos.bootstraps import change_conf, write_conf

CDC = "SELECT table_name, cdc, gc_grace_seconds FROM system_schema.tables WHERE keyspace_name = %s"


class Airflow:
    """Keeps which DAGs were switched off."""

    def __init__(self) -> None:
        self.paused: list[str] = []

    def set_paused(self, dag: str, paused: bool) -> None:
        assert paused
        self.paused.append(dag)

    def busy_tasks(self, dag: str) -> list[str]:
        return []


class Left:
    """An installation, and tables: ``followed`` and ``other`` have cdc, ``plain`` does not."""

    def __init__(self, conf: Path, keyspace: str, session: Any) -> None:
        self.conf, self.keyspace, self._session = conf, keyspace, session
        self.store, self.airflow = LocalStore(conf.parent / "lake"), Airflow()
        self.waited = Waited("", ())

    def leave(self, *options: str) -> int:
        return main(["leave", "--conf", str(self.conf), *options])

    @property
    def with_cdc(self) -> set[str]:
        rows = [*self._session.execute(CDC, (self.keyspace,))]
        assert {row.gc_grace_seconds for row in rows} == {7}
        return {row.table_name for row in rows if row.cdc}


@pytest.fixture
def left(
    cassandra: CassandraNode, session: Any, keyspace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Left]:
    for name, cdc in (("followed", True), ("plain", False), ("other", True)):
        session.execute(f"DROP TABLE IF EXISTS {keyspace}.{name}")
        session.execute(
            f"CREATE TABLE {keyspace}.{name} (id int PRIMARY KEY) WITH gc_grace_seconds = 7 AND cdc = {cdc}"
        )
    conf = write_conf(tmp_path, [cassandra])
    change_conf(conf, sync={"include": [f"{keyspace}.*"], "exclude": [f"{keyspace}.other"]})
    found = Left(conf, keyspace, session)
    monkeypatch.setattr(leave, "client_of", lambda _: found.airflow)
    monkeypatch.setattr(leave, "wait_until_published", lambda *_, **__: found.waited)
    monkeypatch.setattr(
        leave, "asked_nodes", lambda _: nullcontext(lambda host: False)
    )  # the archive of "h" is not that of this node
    # Tables of other tests have cdc, too.
    alike = leave.tables_with_cdc

    def ours(*given: Any) -> Any:
        return tuple(tuple(one for one in tables if one.keyspace == keyspace) for tables in alike(*given))

    monkeypatch.setattr(leave, "tables_with_cdc", ours)
    yield found
    for name in ("followed", "plain", "other"):
        session.execute(f"DROP TABLE IF EXISTS {keyspace}.{name}")


def archive_says(left: Left, **node: Any) -> None:
    put_status(
        left.store,
        "commitlog_archive",
        "default",
        {"nodes": {"h": {"endpoint": "n", "folder": "/raw", "waiting": 0, **node}}},
    )


@pytest.mark.server
def test_nothing_is_changed_without_consent(left: Left, capsys: pytest.CaptureFixture[str]) -> None:
    assert left.leave("--others", "disable") == 0
    said = capsys.readouterr().out
    assert f"would switch cdc off on {left.keyspace}.followed\n" in said
    assert f"would switch cdc off on {left.keyspace}.other\n" in said
    assert "nothing was changed: 2 tables; --yes does it" in said
    assert (left.with_cdc, left.airflow.paused, left.store.list()) == ({"followed", "other"}, [], [])


@pytest.mark.server
def test_tables_that_are_not_followed_are_named_before_anything_is_changed(
    left: Left, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their writes would be refused once nobody empties ``cdc_raw``."""
    assert left.leave("--yes") == 3
    said = capsys.readouterr().err
    assert f"these tables have cdc, and are not followed: {left.keyspace}.other. Once nobody empties cdc_raw" in said
    bootstrap = {
        "table": "shop.orders",
        "table_id": "id",
        "bootstrap": "b",
        "run": "r",
        "step": "scan",
        "fraction": 0.5,
    }
    put_status(left.store, "bootstrap", "id", bootstrap)
    assert left.leave("--yes", "--others", "keep") == 3
    assert "bootstraps are not finished: shop.orders" in capsys.readouterr().err
    assert (left.with_cdc, left.airflow.paused) == ({"followed", "other"}, [])


@pytest.mark.server
def test_the_dags_stay_on_until_the_logs_are_empty(
    left: Left, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left.waited = Waited("the log of node a is not staged: 5 bytes are left", ())
    assert left.leave("--yes", "--others", "keep") == 1
    captured = capsys.readouterr()
    assert f"{left.keyspace}.other keeps cdc: somebody else has to empty cdc_raw" in captured.out
    assert f"{left.keyspace}.followed: cdc disabled now" in captured.out
    assert "the log of node a is not staged: 5 bytes are left. The DAGs stay on" in captured.err
    left.waited = Waited("", ())
    assert left.leave("--yes", "--others", "keep", "--timeout", "0") == 1
    assert "queue default: its archive has not looked yet. The DAGs stay on" in capsys.readouterr().err
    monkeypatch.setattr(leave.time, "sleep", lambda _: None)
    monkeypatch.setattr(leave, "wait_until_published", lambda *_, **__: archive_says(left, waiting=3) or left.waited)
    assert left.leave("--yes", "--others", "keep", "--timeout", "0") == 1
    assert "3 finished segments are in /raw. The DAGs stay on" in capsys.readouterr().err
    assert (left.with_cdc, left.airflow.paused, left.store.stat(STOP_KEY)) == ({"other"}, [], None)
    monkeypatch.setattr(leave, "wait_until_published", lambda *_, **__: archive_says(left) or left.waited)
    assert left.leave("--yes", "--others", "disable") == 0
    assert left.with_cdc == set()
    assert {"commitlog_stage", "bucket_close", "commitlog_archive", "alarms"} <= set(left.airflow.paused)
    assert left.store.stat(STOP_KEY) is not None
    said = capsys.readouterr().out
    assert "DROP KEYSPACE IF EXISTS cdc;" in said
    assert "DROP ROLE" not in said, "there is no login"


@pytest.mark.server
def test_what_is_in_the_logs_can_be_given_up(left: Left) -> None:
    """Production comes first: no bootstrap, also no damaged status of one, stands in the way. Then nothing is missed:
    the archive was called silent, critical, for ever."""
    left.store.put(f"status/bootstrap/{'3' * 32}.json", b"{")
    left.waited = Waited("the sync is stopped: cdcservice start", ())
    assert left.leave("--yes", "--others", "disable", "--no-wait") == 0
    assert (left.with_cdc, "commitlog_stage" in left.airflow.paused) == (set(), True)
    later_s = time.time() + 86_400
    (problem,) = look(load_config(left.conf), left.store, later_s).problems
    assert (problem.kind, problem.text.partition(":")[0]) == ("sync-stopped", "cdcservice leave was run")


@pytest.mark.server
def test_in_need_cdc_is_switched_off_while_nodes_are_down(
    left: Left, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last resort while writes are refused: it was refused, too, since a node was down."""
    for module in (leave, enable_cdc):
        monkeypatch.setattr(module, "one_node", without_one)
    assert left.leave("--yes", "--others", "disable") == 1
    assert "while nodes are down (10.0.0.9)" in capsys.readouterr().err
    assert left.with_cdc == {"followed", "other"}
    assert left.leave("--yes", "--others", "disable", "--no-wait") == 1
    assert "nodes are down or do not know of it (10.0.0.9): they may go on to capture" in capsys.readouterr().err
    assert (left.with_cdc, left.airflow.paused) == (set(), [])


def without_one(session: Any) -> Any:
    node = one_node(session)
    node.down = frozenset({"10.0.0.9"})
    return node


@pytest.mark.server
def test_a_table_on_which_a_kill_has_left_other_seconds_is_mended(left: Left, session: Any) -> None:
    row = session.execute(
        "SELECT id FROM system_schema.tables WHERE keyspace_name = %s AND table_name = 'plain'", (left.keyspace,)
    ).one()
    record = {"gc_grace_seconds": 7, "for_a_moment": 8}
    left.store.put(f"cdc_enabling/{row.id.hex}.json", json.dumps(record).encode())
    session.execute(f"ALTER TABLE {left.keyspace}.plain WITH gc_grace_seconds = 8")
    assert left.leave("--yes", "--others", "disable", "--no-wait") == 0
    assert left.with_cdc == set()


def test_the_role_and_the_places_are_named(tmp_path: Path) -> None:
    conf = tmp_path / "ringsync.yaml"
    login = "username: ringsync, password: {env: X}"
    conf.write_text(f"server_name: s\nstore: {{url: lake}}\ncassandra: {{contact_points: [a], {login}}}\n")
    text = "\n".join(leave.what_remains(load_config(conf), LocalStore(tmp_path / "lake")))
    assert 'DROP ROLE IF EXISTS "ringsync";' in text
    assert f"in file://{tmp_path}/lake: all but replica/, current/ and streams/" in text
