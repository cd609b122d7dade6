"""Alarms are raised when a problem lasts, cleared when it is over, and told to everybody, whatever fails meanwhile."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml

from ringsync.cli import main
from ringsync.config import Config, load_config
from ringsync.ledger.alarms import Active, Alarm, forget_before, get_active, history, raised_now
from ringsync.ledger.database import CDC_LOGS
from ringsync.ledger.gaps import Gap, note_gap, note_verified
from ringsync.service import telling
from ringsync.service.alarms import Watch, watch
from ringsync.service.look import look
from ringsync.service.problem import Kind, Problem
from ringsync.service.telling import MOST_REFUSALS, MOST_UNTOLD, Maker, Notify, UnmadeError
from ringsync.state.undecodable import forget_undecodable, note_undecodable
from ringsync.status import read_statuses
from ringsync.steps.loop import put_status
from ringsync.storage import open_store
from ringsync.storage.port import ObjectStore
from ringsync.wiring import store_of

RUNBOOK = Path(__file__).parents[2] / "docs" / "runbook.md"
FAILING = Problem(Kind.TABLE_FAILING, "shop.orders", "shop.orders: no quorum")
LOST = Problem(Kind.SEGMENTS_LOST, "node a", "changes are missing")
NOON = 1_796_040_000_000
MINUTE = 60_000


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "lake"))


class Told(list[str]):
    """A notifier that keeps what it was told, and fails if it shall."""

    failure: Exception | None = None

    def __call__(self, alarm: Alarm) -> None:
        if self.failure:
            raise self.failure
        self.append(f"{alarm.kind} {'cleared' if alarm.cleared_ms else 'raised'}")


def making(*notifiers: Notify) -> list[Maker]:
    return [partial(lambda notify: notify, notify) for notify in notifiers]


def test_a_problem_that_lasts_is_raised_and_cleared(store: ObjectStore) -> None:
    told = Told()
    watching = Watch(store, making(told), MINUTE)
    for second in (0, 30):
        watching.look([FAILING], NOON + second * 1000)
        assert (told, watching.raised) == ([], [])
    watching.look([replace(FAILING, text="shop.orders: 2 of 3")], NOON + MINUTE)
    assert told == ["table-failing raised"]
    watching.look([], NOON + MINUTE + 30_000)
    assert [alarm.text for alarm in watching.raised] == ["shop.orders: 2 of 3"]
    watching.look([], NOON + 2 * MINUTE)
    assert told == ["table-failing raised", "table-failing cleared"]
    assert watching.raised == []
    (alarm,) = history(store, NOON)
    assert (alarm.since_ms, alarm.raised_ms, alarm.cleared_ms) == (NOON, NOON + MINUTE, NOON + 2 * MINUTE)


def test_a_problem_that_passes_is_told_to_nobody(store: ObjectStore) -> None:
    told = Told()
    watching = Watch(store, making(told), MINUTE)
    for minute in range(0, 10, 2):
        watching.look([FAILING], NOON + minute * MINUTE)
        watching.look([], NOON + (minute + 1) * MINUTE)
    assert (told, list(history(store, 0))) == ([], [])


def test_what_is_critical_is_raised_at_once(store: ObjectStore) -> None:
    told = Told()
    Watch(store, making(told), MINUTE).look([FAILING, LOST], NOON)
    assert told == ["segments-lost raised"]


def test_a_task_goes_on_with_what_the_one_before_has_known(store: ObjectStore) -> None:
    told = Told()
    Watch(store, making(told), MINUTE).look([LOST], NOON)
    Watch(store, making(told), MINUTE).look([LOST], NOON + 5 * MINUTE)
    last = Watch(store, making(told), MINUTE)
    for minute in (7, 8):
        last.look([], NOON + minute * MINUTE)
    assert told == ["segments-lost raised", "segments-lost cleared"]
    (alarm,) = history(store, 0)
    assert (alarm.raised_ms, alarm.cleared_ms) == (NOON, NOON + 8 * MINUTE)


def test_a_notifier_that_fails_is_told_later_and_in_order(store: ObjectStore) -> None:
    mail, chat = Told(), Told()
    mail.failure = OSError("connection refused")
    watching = Watch(store, making(mail, chat), MINUTE)
    watching.look([LOST], NOON)
    watching.look([], NOON + MINUTE)
    assert (mail, chat) == ([], ["segments-lost raised", "segments-lost cleared"])
    assert watching.problems == ["notifier 0 (alarms.notifiers) fails (OSError); 2 notifications wait"]
    mail.failure = None
    after_a_restart = Watch(store, making(mail, chat), MINUTE)
    after_a_restart.look([], NOON + 2 * MINUTE)
    assert mail == chat == ["segments-lost raised", "segments-lost cleared"]
    assert after_a_restart.problems == []
    assert get_active(store) == Active()


def test_what_waits_for_a_notifier_is_bounded_and_what_is_critical_stays(store: ObjectStore) -> None:
    mail, chat = Told(), Told()
    mail.failure = OSError("https://hooks.example.org/secret")
    watching = Watch(store, making(mail, chat), 0)
    many = [replace(FAILING, where=f"shop.t{number}") for number in range(MOST_UNTOLD)]
    watching.look([LOST, *many, replace(LOST, where="node b")], NOON)
    waited(lambda: len(chat) == MOST_UNTOLD)
    assert "segments-lost raised" in chat
    mail.failure = None
    watching.look([LOST, *many, replace(LOST, where="node b")], NOON + 1)
    waited(lambda: len(mail) == MOST_UNTOLD)
    assert mail.count("segments-lost raised") == 2
    assert watching.problems[0] == "notifier 0 (alarms.notifiers) was not told of 2 alarms: cdcservice alarms"
    assert len(list(history(store, NOON))) == MOST_UNTOLD + 2
    assert b"secret" not in store.get("alarms/active.json")


def waited(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_notification_that_is_refused_holds_up_no_other(store: ObjectStore) -> None:
    told: list[str] = []

    def picky(alarm: Alarm) -> None:
        if alarm.where == "node too long":
            raise ValueError("413")
        told.append(alarm.where)

    watching = Watch(store, making(picky), 0)
    for number in range(MOST_REFUSALS + 1):
        found = [
            replace(LOST, where="node too long"),
            *(replace(LOST, where=f"node {one}") for one in range(number + 1)),
        ]
        watching.look(found, NOON + number)
    assert told == [f"node {number}" for number in range(MOST_REFUSALS + 1)]
    assert watching.problems == ["notifier 0 (alarms.notifiers) was not told of 1 alarms: cdcservice alarms"]


def test_a_notifier_that_hangs_holds_up_nobody(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "JOIN_S", 0.05)
    monkeypatch.setattr(telling, "HANGS_S", 0.2)
    release, chat = threading.Event(), Told()
    watching = Watch(store, making(lambda alarm: bool(release.wait(30)) or None, chat), 0)
    watching.look([LOST], NOON)
    time.sleep(0.3)
    watching.look([], NOON + 1)
    assert chat == ["segments-lost raised", "segments-lost cleared"]
    assert "has not answered for 0 s; 2 notifications wait" in watching.problems[0]
    release.set()
    waited(lambda: not watching.problems)


def test_a_notifier_that_cannot_be_made_is_named_at_the_first_look_and_holds_up_nobody(store: ObjectStore) -> None:
    """The task failed, so nobody was told of anything."""
    chat, mail, is_there = Told(), Told(), list[bool]()

    def make() -> Notify:
        if not is_there:
            raise UnmadeError("nowhere.Writes (ModuleNotFoundError)") from ModuleNotFoundError("token=s3cret")
        return mail

    def refuse() -> Notify:
        raise SystemExit("https://hooks.example.org/s3cret")

    watching = Watch(store, [make, refuse, *making(chat)], MINUTE)
    watching.look([], NOON)
    waits = "cannot be made: {}; {} notifications wait"
    assert watching.problems == [
        "notifier 0 (alarms.notifiers) " + waits.format("nowhere.Writes (ModuleNotFoundError)", 0),
        "notifier 1 (alarms.notifiers) " + waits.format("SystemExit", 0),
    ]
    watching.look([LOST], NOON + 1)
    assert chat == ["segments-lost raised"]
    assert watching.problems[0].endswith("1 notifications wait")
    is_there.append(True)
    watching.look([LOST], NOON + 2)
    assert mail == ["segments-lost raised"]
    assert len(watching.problems) == 1
    assert b"s3cret" not in b"".join(store.get(one.key) for one in store.list())


def test_a_notifier_that_hangs_while_it_is_made_holds_up_nobody(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telling, "JOIN_S", 0.05)
    monkeypatch.setattr(telling, "HANGS_S", 0.2)
    release, chat = threading.Event(), Told()
    watching = Watch(store, [lambda: release.wait(30) and chat, *making(chat)], 0)  # type: ignore[list-item]
    watching.look([LOST], NOON)
    assert chat == ["segments-lost raised"]
    time.sleep(0.3)
    assert "has not answered for 0 s; 1 notifications wait" in watching.problems[0]
    release.set()
    waited(lambda: not watching.problems)


def test_a_wrong_configuration_is_an_alarm_while_the_last_good_one_is_used(conf: Path, store: ObjectStore) -> None:
    clock = [0.0]

    def sleep(slept: float) -> None:
        clock[0] += slept

    conf.write_text(conf.read_text().replace("after_s: 25", "after_s: 0") + "sync: {run_s: 20}")
    for error in ("ringsync.yaml: kafca: unknown key", ""):
        clock[0] = time.time()
        watch(load_config(conf), store, [], wrong=partial(str, error), clock=partial(max, clock), sleep=sleep)
        raised = [alarm.text for alarm in raised_now(store) if alarm.kind == "config-wrong"]
        assert raised == [f"alarms/alarms: {error}"] * bool(error)


def test_while_something_cannot_be_asked_its_alarms_stay(store: ObjectStore) -> None:
    told = Told()
    watching = Watch(store, making(told), MINUTE)
    owned = replace(FAILING, owner="bucket_close/close")
    watching.look([LOST, owned], NOON)
    watching.look([LOST, owned], NOON + MINUTE)
    blip = replace(FAILING, where="shop.blip", owner="bucket_close/close")
    watching.look([blip], NOON + MINUTE + 1, lambda owner: owner == "")
    for minute in range(2, 10):
        watching.look([], NOON + minute * MINUTE, lambda owner: owner == "")
    assert told == ["segments-lost raised", "table-failing raised", "segments-lost cleared"]
    watching.look([], NOON + 12 * MINUTE)
    assert told[3:] == ["table-failing cleared"], "what nobody has confirmed is not raised"


def test_a_clock_that_goes_back_stops_nothing(store: ObjectStore) -> None:
    told = Told()
    watching = Watch(store, making(told), MINUTE)
    watching.look([FAILING], NOON)
    for second in (0, 30, 61, 125):
        watching.look([FAILING] if second < 61 else [], NOON - 60 * MINUTE + second * 1000)
    watching.look([FAILING], NOON - 50 * MINUTE)
    watching.look([FAILING], NOON - 49 * MINUTE)
    assert told == ["table-failing raised"]


def test_what_was_never_cleared_is_looked_up_again(store: ObjectStore) -> None:
    """The task was killed, or what it has put was damaged."""
    Watch(store, [], MINUTE).look([LOST, replace(LOST, where="node b")], NOON)
    store.put("alarms/active.json", b"{")
    told = Told()
    watching = Watch(store, making(told), MINUTE)
    watching.look([LOST], NOON + MINUTE)
    watching.look([LOST], NOON + 2 * MINUTE)
    assert told == ["segments-lost cleared"]
    assert [(one.where, one.cleared_ms is None) for one in history(store, 0)] == [("node a", True), ("node b", False)]


def test_problems_at_one_place_are_one_alarm_with_all_their_texts(store: ObjectStore) -> None:
    watching = Watch(store, [], MINUTE)
    watching.look([replace(LOST, text=f"text {number}") for number in range(5)], NOON)
    assert [alarm.text for alarm in watching.raised] == ["text 0; text 1; text 2 (and 2 more)"]


def test_without_the_store_alarms_are_told_from_memory(store: ObjectStore, tmp_path: Path) -> None:
    lake, told = tmp_path / "lake", Told()
    lake.write_text("a file where the store was")
    watching = Watch(store, making(told), MINUTE)
    watching.look([LOST], NOON)
    assert told == ["segments-lost raised"]
    lake.unlink()
    watching.look([LOST], NOON + 1)
    assert [alarm.kind for alarm in history(store, 0)] == ["segments-lost"]


def test_what_is_not_ours_is_passed_over_without_a_word(store: ObjectStore, capsys: pytest.CaptureFixture[str]) -> None:
    """Each look at the history would warn of it."""
    watching = Watch(store, [], 0)
    watching.look([FAILING], NOON)
    for key in ("alarms/history/notes.txt", f"{next(iter(history(store, NOON))).key}~"):
        store.put(key, b"?")
    capsys.readouterr()
    assert len(list(history(store, NOON))) == 1
    assert capsys.readouterr().out == ""


def test_old_alarms_are_forgotten_by_day(store: ObjectStore) -> None:
    day = 24 * 60 * MINUTE
    watching = Watch(store, [], MINUTE)
    for number in range(3):
        watching.look([LOST], NOON + number * day)
        watching.look([], NOON + number * day + MINUTE)
    assert forget_before(store, NOON + day) == 1
    assert [alarm.raised_ms for alarm in history(store, 0)] == [NOON + day, NOON + 2 * day]
    assert [alarm.raised_ms for alarm in history(store, NOON + day + 1)] == [NOON + 2 * day]


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RINGSYNC_AIRFLOW_PASSWORD", "secret")
    return written_conf(tmp_path)


def written_conf(folder: Path) -> Path:
    document = {
        "server_name": "s",
        "cassandra": {"contact_points": ["10.0.0.1"]},
        "store": {"url": "lake"},
        "metrics": {"prometheus_file": "ringsync.prom"},
        # A port on which nobody answers.
        "airflow": {"url": "http://127.0.0.1:9"},
        "alarms": {"after_s": 25},
    }
    (folder / "ringsync.yaml").write_text(yaml.safe_dump(document))
    return folder / "ringsync.yaml"


def watched(config: Config, store: ObjectStore, now_s: float, seconds: float, clock: list[float] | None = None) -> int:
    """Watch for so long, with a clock that only sleeping moves."""
    clock = [now_s] if clock is None else clock

    def sleep(slept: float) -> None:
        clock[0] += slept

    short = config.model_copy(update={"sync": config.sync.model_copy(update={"run_s": seconds})})
    return watch(short, store, [], clock=lambda: clock[0], sleep=sleep)


def test_a_watch_writes_status_and_metrics_and_the_command_lists_alarms(
    conf: Path, store: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(conf)
    put_status(store, "bucket_close", "close", {"tables": {"shop.orders": {"last_pass": 3, "error": "no quorum"}}})
    assert watched(config, store, time.time(), 20) == 0
    assert watched(config, store, time.time() + 40, 20) > 3
    text = (tmp_path / "ringsync.prom").read_text()
    assert 'ringsync_table_pass{table="shop.orders"} 3' in text
    assert 'ringsync_alarm{kind="table-failing",where="shop.orders",severity="warning"} 1.0' in text
    assert 'ringsync_alarm{kind="airflow-away",where="Airflow",severity="warning"} 1.0' in text
    assert read_statuses(store)["alarms/alarms"]["raised"] > 3
    capsys.readouterr()
    assert main(["status", "--prometheus", "--conf", str(conf)]) == 0
    assert 'ringsync_alarm{kind="table-failing"' in capsys.readouterr().out
    assert main(["alarms", "--conf", str(conf)]) == 1
    said = capsys.readouterr().out
    assert re.search(r"table-failing at shop\.orders, raised for .*: shop\.orders: no quorum \(docs/runbook\.md#", said)
    assert main(["alarms", "--json", "--conf", str(conf)]) == 1
    kinds = {json.loads(line)["kind"] for line in capsys.readouterr().out.splitlines()}
    assert {"table-failing", "airflow-away", "loop-silent"} <= kinds


def test_a_store_that_is_not_mounted_any_more_is_away_and_clears_nothing(conf: Path, tmp_path: Path) -> None:
    config, told = load_config(conf), list[str]()
    store, now_s = store_of(config), time.time()
    put_status(store, "commitlog_archive", "default", {"nodes": {"h": {"endpoint": "n", "error": "3 MB are free"}}})
    clock = [now_s]

    def sleep(slept: float) -> None:
        clock[0] += slept
        if now_s + 40 < clock[0] <= now_s + 40 + slept:
            (tmp_path / "lake").rename(tmp_path / "elsewhere")
            (tmp_path / "lake").mkdir()

    short = config.model_copy(update={"sync": config.sync.model_copy(update={"run_s": 120})})
    watch(short, store, making(lambda alarm: told.append(alarm.summary())), clock=lambda: clock[0], sleep=sleep)
    assert any("3 MB are free" in one for one in told)
    assert any("is it mounted?" in one for one in told)
    assert not [one for one in told if "cleared" in one], told
    assert list((tmp_path / "lake").iterdir()) == []


def test_metrics_that_cannot_be_written_end_no_watch(
    conf: Path, store: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = yaml.safe_load(conf.read_text()) | {"metrics": {"prometheus_file": "nowhere/x.prom"}}
    conf.write_text(yaml.safe_dump(document))
    watched(load_config(conf), store, 1.0, 0)
    assert "ringsync: warning: metrics.prometheus_file: " in capsys.readouterr().out


def test_nothing_raised_is_said_if_somebody_watches(
    conf: Path, store: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["alarms", "--conf", str(conf)]) == 1
    assert "nobody watches: the DAG alarms gives no sign of life" in capsys.readouterr().err
    put_status(store, "alarms", "alarms", {})
    assert main(["alarms", "--conf", str(conf)]) == 0
    assert capsys.readouterr().out == "no alarm was raised\n"
    assert main(["alarms", "--days", "30", "--json", "--conf", str(conf)]) == 0
    with pytest.raises(SystemExit) as ended:
        main(["alarms", "--days", "nan", "--conf", str(conf)])
    assert ended.value.code == 3


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", RUNBOOK.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_runbook_has_a_section_for_each_kind_and_no_other() -> None:
    assert list(sections()) == [*dict.fromkeys(sections())]
    assert set(sections()) == {str(kind) for kind in Kind}


@pytest.mark.parametrize("kind", Kind)
def test_each_section_says_what_to_do_and_when_it_is_over(kind: Kind) -> None:
    text = sections()[kind]
    assert ("**Critical.**" in text) == Problem(kind, "", "").is_critical
    assert re.search(r"\*\*What to do\.\*\* \S.*\n\n\*\*It clears\*\* \S", text, re.DOTALL)


def test_a_gap_is_told_from_its_object_whoever_has_found_it(conf: Path, store: ObjectStore) -> None:
    """Its node may have left, its stage may be dead, and others may have worse to tell of the same node."""
    tables = {"a" * 32: "shop.orders", "b" * 32: "shop.plain"}
    note_gap(store, Gap("4e5d", "10.0.0.1:9042", "CommitLog-7-1.log", 0, NOON, tables, ((0, 1),)))
    store.put("gaps/4e5d/CommitLog-7-2.log.json", b"{")
    of_tables = {"shop.orders": {"replica_pass": 3}, "shop.plain": {"replica_pass": None}}
    put_status(store, "bucket_close", "close", {"tables": of_tables})
    seen = look(load_config(conf), store, time.time())
    first, second = (one for one in seen.problems if one.kind == Kind.SEGMENTS_LOST)
    assert (first.where, second.where) == ("node 10.0.0.1:9042, CommitLog-7-1.log", "gaps/4e5d/CommitLog-7-2.log.json")
    assert first.text.endswith("are missing. Correct the replicas: cdcservice verify --repair --table shop.orders")


@pytest.mark.parametrize(("node", "where"), [("4e5d", "node 4e5d"), (CDC_LOGS, "CDC logs")])
def test_records_that_could_not_be_decoded_are_told_for_as_long_as_they_wait(
    conf: Path, store: ObjectStore, node: str, where: str
) -> None:
    """The alarm was over with the loop's next run, and those of archived logs raised none."""

    def told() -> list[str]:
        seen = look(load_config(conf), store, time.time())
        return [f"{one.where}, {one.text}" for one in seen.problems if one.kind == Kind.RECORDS_UNDECODABLE]

    assert told() == []
    note_undecodable(store, node)
    (text,) = told()
    assert text.startswith(f"{where}, {where}: ")
    assert text.endswith(f"cdcservice errors list --node {node}")
    forget_undecodable(store, node)
    assert told() == []


def test_the_watch_closes_a_gap_that_is_over(conf: Path, store: ObjectStore) -> None:
    note_gap(store, Gap("4e5d", "10.0.0.1:9042", "CommitLog-7-1.log", 0, NOON, {"a" * 32: "shop.orders"}, ()))
    note_verified(store, "a" * 32, NOON)
    watched(load_config(conf), store, time.time(), 0)
    assert len(store.list("gaps/")) == 1
    note_verified(store, "a" * 32, NOON + 1)
    seen = look(load_config(conf), store, time.time())
    assert [one.kind for one in seen.problems if one.kind == Kind.SEGMENTS_LOST] == []
    assert len(store.list("gaps/")) == 1, "who only looks changes nothing"
    watched(load_config(conf), store, time.time(), 0)
    assert store.list("gaps/") == []


def test_a_damaged_status_hides_nothing_else(conf: Path, store: ObjectStore) -> None:
    store.put("status/commitlog_stage/default.json", b"<html>")
    store.put("status/out_of_sequence/queue.json", b"{}")
    put_status(store, "schema_update", "schema", {"nodes": ["of another version"], "tables": 7})
    put_status(store, "bucket_close", "close", {"tables": {"shop.orders": {"error": "no quorum"}}})
    watched(load_config(conf), store, time.time(), 0)
    texts = [one.text for one in look(load_config(conf), store, time.time()).problems]
    assert "shop.orders: no quorum" in texts
    assert sum("is damaged, or of another version" in text for text in texts) == 3
