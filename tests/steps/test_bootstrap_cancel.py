"""A bootstrap that is not finished, on a real node: it is cancelled and its stream goes on, or its end is repeated."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ringsync.cli import main
from ringsync.cluster.schema import read_table
from ringsync.cluster.session import connect
from ringsync.config import load_config
from ringsync.ledger.passes import Pass, TableReplacedError, get_pass, mark, pass_folder, pass_numbers, put_pass
from ringsync.ledger.topic_owners import take_topic
from ringsync.ring.tokens import TokenRange
from ringsync.schema.table import Schema, TableSchema, UnreadableTable
from ringsync.state.bootstrap import CANCELLED, COMPLETED, PUBLISHING, SCANNING, Bootstrap, BootstrapState
from ringsync.status import read_statuses
from ringsync.steps.application import Application, ExitCode, Report, StepError
from ringsync.steps.bootstrap import cancel as bootstrap_cancel
from ringsync.steps.bootstrap import drain as bootstrap_drain
from ringsync.steps.bootstrap import scan as bootstrap_scan
from ringsync.steps.bootstrap.plan import load_plan
from ringsync.steps.bootstrap.prepare import begin_pass
from ringsync.steps.passes.follow_ups import put_schemas
from ringsync.steps.sync_plan import SyncTable, sync_table
from ringsync.storage.port import ObjectStore
from ringsync.streams.files import FileStream, bootstrap_topic
from ringsync.wiring import cluster_settings, store_of
from servers.cassandra import CassandraNode
from tests.chaos.bootstraps import change_conf, prepare, write_conf

pytestmark = pytest.mark.server


class Followed:
    """A table that has a bootstrap, and whose changes wait."""

    def __init__(self, conf: Path, name: str) -> None:
        self.conf, self.name = conf, name
        self.config = load_config(conf)
        self.store: ObjectStore = store_of(self.config)
        self.session = connect(cluster_settings(self.config))
        self.state = BootstrapState(self.session, self.config.state.keyspace)
        self.schema: TableSchema = read_table(self.session, *name.split("."))
        self.table: SyncTable = sync_table(self.store, self.config, self.schema)

    def found(self) -> Bootstrap:
        latest = self.state.find(*self.name.split("."))
        assert latest is not None
        return latest

    def run(self, step: ModuleType, run: str) -> tuple[Report, ExitCode]:
        keyspace, _, table = self.name.partition(".")
        given = (self.config, self.store, (keyspace, table), run, argparse.Namespace())
        found: tuple[Report, ExitCode] = step.run(Application(step.__name__, str(self.conf), *given))
        return found

    def changes(self, bootstrap: str) -> None:
        """A pass that the closer has made; without messages."""
        topic = bootstrap_topic(self.table.topic) if bootstrap else self.table.topic
        version = put_schemas(self.store, self.config, self.table, topic)
        number = pass_numbers(self.store, self.table.table_id)[-1] + 1
        part = FileStream(self.store, topic).open_part(pass_folder(number), "part", version).finish()
        assert put_pass(self.store, Pass(number, "changes", self.table.table_id, 1, bootstrap, parts=(part,)))

    def kinds(self) -> list[str]:
        return [
            get_pass(self.store, self.table.table_id, n).kind for n in pass_numbers(self.store, self.table.table_id)
        ]

    @property
    def folders(self) -> list[str]:
        return FileStream(self.store, self.table.topic).folders()


@pytest.fixture
def followed(cassandra: CassandraNode, session: Any, keyspace: str, tmp_path: Path) -> Followed:
    name = f"{keyspace}.orders"
    session.execute(f"DROP TABLE IF EXISTS {name}")
    session.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, v int)")
    return Followed(write_conf(tmp_path, [cassandra]), name)


def cancel(followed: Followed) -> int:
    return main(["bootstrap", "--cancel", "--table", followed.name, "--conf", str(followed.conf)])


def test_a_cancelled_bootstrap_lets_the_stream_go_on(followed: Followed) -> None:
    first = prepare(followed.conf, followed.name, "one")
    followed.changes(first)
    (told,) = [one for key, one in read_statuses(followed.store).items() if key.startswith("bootstrap/")]
    assert (told["table"], told["bootstrap"], told["step"]) == (followed.name, first, "prepare")
    left = f"streams/{followed.table.topic}/{pass_folder(1)}/part-0001.avro"
    followed.store.put(left, b"half")
    with pytest.raises(StepError, match=r"not everything of .* is copied"):
        followed.run(bootstrap_drain, "one")
    for _ in range(2):
        assert cancel(followed) == ExitCode.OK
        assert followed.found().state == CANCELLED
        assert followed.kinds() == ["begin", "changes", "cutover"]
        assert followed.folders == [pass_folder(2)]
    assert followed.store.stat(left) is None
    assert not any(key.startswith("bootstrap/") for key in read_statuses(followed.store))
    for step in (bootstrap_scan, bootstrap_drain):
        with pytest.raises(StepError, match=f"bootstrap {first} of .* was cancelled"):
            followed.run(step, "one")
    with pytest.raises(StepError, match="was cancelled"):
        prepare(followed.conf, followed.name, "one")
    assert followed.kinds() == ["begin", "changes", "cutover"]
    assert prepare(followed.conf, followed.name, "two") != first


def test_what_is_copied_is_finished_and_not_cancelled(followed: Followed, capsys: pytest.CaptureFixture[str]) -> None:
    """The drain has failed: who asks for the same again goes on there."""
    first = prepare(followed.conf, followed.name, "one")
    followed.state.publishing(followed.found())
    mark(followed.store, followed.table.table_id, "rows", first, 1)
    followed.changes(first)
    assert cancel(followed) == ExitCode.FATAL
    assert f"bootstrap {first} of {followed.name} has copied everything" in capsys.readouterr().err
    assert prepare(followed.conf, followed.name, "two") == first
    assert followed.found().state == PUBLISHING
    for _ in range(2):
        report, code = followed.run(bootstrap_drain, "two")
        assert (report["bootstrap"], code) == (first, ExitCode.OK)
        assert followed.found().state == COMPLETED
    assert followed.kinds() == ["begin", "rows", "changes", "cutover"]
    assert followed.folders == [pass_folder(1), pass_folder(3)]
    assert cancel(followed) == ExitCode.FATAL
    assert f"{followed.name} has no unfinished bootstrap" in capsys.readouterr().err
    assert prepare(followed.conf, followed.name, "three") != first


def test_the_bootstrap_of_a_table_that_cannot_be_read_is_not_taken_for_one_of_a_dropped_table(
    followed: Followed, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(followed.conf, followed.name, "one")
    followed.state.publishing(followed.found())
    mark(followed.store, followed.table.table_id, "rows", first, 1)
    keyspace, name = followed.name.split(".")
    unreadable = UnreadableTable(keyspace, name, followed.table.table_id, "its column v has an unknown type")
    monkeypatch.setattr(bootstrap_cancel, "read_tables", lambda session: Schema((), (unreadable,)))
    assert cancel(followed) == ExitCode.FATAL
    assert "its schema cannot be read: its column v has an unknown type" in capsys.readouterr().err
    assert followed.found().state == PUBLISHING


def test_a_drain_that_was_killed_behind_its_cutover_is_repeated(followed: Followed) -> None:
    """The stream has gone on meanwhile: nothing begins a second time."""
    first = prepare(followed.conf, followed.name, "one")
    followed.state.publishing(followed.found())
    mark(followed.store, followed.table.table_id, "rows", first, 1)
    mark(followed.store, followed.table.table_id, "cutover", first, 1)
    followed.changes("")
    assert prepare(followed.conf, followed.name, "two") == first
    assert followed.run(bootstrap_drain, "two")[1] == ExitCode.OK
    assert followed.found().state == COMPLETED
    assert followed.kinds() == ["begin", "rows", "cutover", "changes"]
    prepare(followed.conf, followed.name, "two")
    assert followed.kinds() == ["begin", "rows", "cutover", "changes"], "its run, once more"


def test_who_is_slow_to_cancel_does_not_end_the_next(
    followed: Followed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(followed.conf, followed.name, "one")

    def slow(*arguments: Any) -> None:
        take_topic(*arguments)
        prepare(followed.conf, followed.name, "two")

    monkeypatch.setattr(bootstrap_cancel, "take_topic", slow)
    assert cancel(followed) == ExitCode.FATAL
    assert "another has begun meanwhile" in capsys.readouterr().err
    assert (followed.kinds(), followed.found().state) == (["begin", "begin"], SCANNING)


@pytest.mark.parametrize("copied", [False, True])
def test_a_table_that_was_dropped_has_its_bootstrap_cancelled(followed: Followed, session: Any, copied: bool) -> None:
    """Also when all of it was copied: nobody can finish it any more."""
    prepare(followed.conf, followed.name, "one")
    if copied:
        followed.state.publishing(followed.found())
    session.execute(f"DROP TABLE {followed.name}")
    for _ in range(2):
        assert cancel(followed) == ExitCode.OK
        assert followed.found().state == CANCELLED
        assert not any(key.startswith("bootstrap/") for key in read_statuses(followed.store))


def test_a_table_that_was_created_again_is_bootstrapped_anew(followed: Followed, session: Any) -> None:
    """Nobody goes on with what was begun of the old one, and what waited of it is published first."""
    first = prepare(followed.conf, followed.name, "one")
    followed.changes(first)
    session.execute(f"DROP TABLE {followed.name}")
    session.execute(f"CREATE TABLE {followed.name} (id int PRIMARY KEY, v int)")
    again = Followed(followed.conf, followed.name)
    second = prepare(again.conf, again.name, "two")
    assert second != first
    again.changes(second)
    statuses = [one for key, one in read_statuses(again.store).items() if key.startswith("bootstrap/")]
    assert [one["table_id"] for one in statuses] == [again.table.table_id]
    assert cancel(again) == ExitCode.OK
    assert (followed.kinds(), again.kinds()) == (["begin", "changes", "end"], ["start", "begin", "changes", "cutover"])
    assert again.folders == [pass_folder(2), pass_folder(5)]
    with pytest.raises(StepError, match=r"the schema of .* changed"):
        followed.run(bootstrap_scan, "one")
    with pytest.raises(TableReplacedError):
        begin_pass(followed.store, load_plan(followed.store, "one"), again.found(), lambda: None)


def test_a_part_of_a_table_that_is_followed_is_refused(followed: Followed, session: Any) -> None:
    part = {"token_range": TokenRange(0, 2**40)}
    with pytest.raises(StepError, match="is followed, so all of it must be copied"):
        prepare(followed.conf, followed.name, "one", **part, enable_cdc=True)
    prepare(followed.conf, followed.name, "two", **part)
    session.execute(f"ALTER TABLE {followed.name} WITH cdc = true")
    with pytest.raises(StepError, match="is followed, so all of it must be copied"):
        prepare(followed.conf, followed.name, "three", **part)
    change_conf(followed.conf, sync={"exclude": [followed.name]})
    prepare(followed.conf, followed.name, "four", **part)
