"""Loops: how long they work, and what ends them."""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from cassandra import AuthenticationFailed, Unauthorized, Unavailable
from cassandra.cluster import NoHostAvailable

from ringsync.cluster import session
from ringsync.cluster.session import ClusterError, UnreachableError
from ringsync.config import ConfigError, load_config
from ringsync.ledger.layout import LayoutError
from ringsync.orchestration import explain_failure
from ringsync.service.expected import Expected
from ringsync.service.health import problems
from ringsync.state.session import StateError, StateSession, StateUnavailableError
from ringsync.status import STOP_KEY, read_status
from ringsync.steps import application, loop, schema_update
from ringsync.steps.application import Application, ExitCode, Report, StepError
from ringsync.steps.close import bucket_close
from ringsync.steps.late import out_of_sequence
from ringsync.steps.loop import (
    MAX_FAILURES,
    PATIENCE_S,
    REFUSED_S,
    AwayError,
    Patience,
    SignOfLife,
    connect_patiently,
    cycles,
    put_status,
    starts_again,
)
from ringsync.steps.stage import commitlog_stage
from ringsync.storage import local, open_store
from ringsync.storage.local import LocalStore
from ringsync.storage.port import ObjectStore, UnavailableError

EXPECTED = Expected.of_commit_logs([])


GOOD = "server_name: s\ncassandra: {contact_points: [10.0.0.1]}\nstore: {url: lake}\n"


def running(
    store: Any, run_s: float, outdated: Callable[[], Callable[[], bool]] = lambda: lambda: False
) -> Application:
    """A run of a loop, as far as its cycles know it."""
    found: Any = SimpleNamespace(
        config=SimpleNamespace(sync=SimpleNamespace(run_s=run_s)), store=store, outdated=outdated
    )
    return found  # type: ignore[no-any-return]


def test_a_loop_ends_when_its_time_is_over_or_somebody_asks(tmp_path: Path) -> None:
    store, clock = open_store(str(tmp_path)), [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    assert list(cycles(running(store, 10.0), 2000, lambda: clock[0], sleep)) == [0, 1, 2, 3, 4, 5]
    assert list(cycles(running(store, 0.0), 2000, lambda: clock[0], sleep)) == [0]
    store.put(STOP_KEY, b"{}")
    assert list(cycles(running(store, 10.0), 2000, lambda: clock[0], sleep)) == [0]
    assert list(cycles(running(store, 4.0), 2000, lambda: clock[0], sleep, heeds_stop=False)) == [0, 1, 2]


CHANGES = {
    "another good one": (GOOD + "archive: {policy: always}\n", 60, 3),
    "another host": (GOOD.replace("10.0.0.1", "10.0.0.2"), 60, 3),
    "only touched": (GOOD, 30, 6),
    "a comment": (GOOD + "# a comment\n", 60, 6),
    "a default": (GOOD + "archive: {policy: pressure}\n", 60, 6),
    "a typo": (GOOD + "kafca: null\n", 60, 6),
    "no YAML": (GOOD + "archive: {", 60, 6),
    "an editor writes it": (GOOD + "archive: {policy: always}\n", 0, 6),
    "gone": (None, 0, 6),
}


@pytest.mark.parametrize(("text", "age_s", "ends_after"), CHANGES.values(), ids=CHANGES)
def test_a_loop_ends_with_its_cycle_when_the_configuration_has_changed(
    tmp_path: Path, text: str | None, age_s: float, ends_after: int
) -> None:
    """The next run reads it; it lasted for hours until then. With a file that it could not read it would only fail."""
    conf = tmp_path / "ringsync.yaml"

    def write(text: str | None, age_s: float) -> None:
        conf.unlink(missing_ok=True)
        if text is not None:
            conf.write_text(text)
            os.utime(conf, (time.time() - age_s,) * 2)

    write(GOOD + "sync: {run_s: 10.0}\n", 90)
    store, clock = open_store(str(tmp_path)), [0.0]
    given: Any = (load_config(conf), store, None, "run", SimpleNamespace())

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    done = []
    for number in cycles(Application("a_loop", str(conf), *given), 2000, lambda: clock[0], sleep):
        done.append(number)
        if number == 2:
            write(text and text + "sync: {run_s: 10.0}\n", age_s)
    assert len(done) == ends_after


def test_late_rows_that_take_hours_are_left_to_the_next_run_when_the_configuration_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf, goes_on = tmp_path / "ringsync.yaml", []
    conf.write_text(GOOD)
    os.utime(conf, (time.time() - 90,) * 2)

    class Late:
        error, problems, counts = None, (), {}  # type: ignore[var-annotated]

        def __init__(self, *_: Any, goes_on: Callable[[], bool]) -> None:
            self._goes_on = goes_on

        def status(self) -> dict[str, Any]:
            return {}

        def cycle(self) -> None:
            for number in range(6):
                if number == 3:
                    conf.write_text(GOOD + "archive: {policy: always}\n")
                    os.utime(conf, (time.time() - 60,) * 2)
                goes_on.append(self._goes_on())

    for name in ("check_layout", "connect_patiently", "create_state", "OutOfSequence", "LatePasses"):
        monkeypatch.setattr(out_of_sequence, name, lambda *_: None)
    monkeypatch.setattr(out_of_sequence, "LateRows", Late)
    given: Any = (load_config(conf), LocalStore(tmp_path / "lake"), None, "run", SimpleNamespace())
    report, code = out_of_sequence.run(Application("out_of_sequence", str(conf), *given))
    assert goes_on == [True] * 3 + [False] * 3
    assert code == ExitCode.OK, report


def test_a_status_waits_for_no_writer_that_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old loop was suspended while it put its own: the new one ended no cycle."""
    monkeypatch.setattr(local, "LOCK_SECONDS", 0.0)
    store = LocalStore(tmp_path)
    with store._locked("status/bucket_close/close.json"):
        put_status(store, "bucket_close", "close", {"tables": {}})
    assert read_status(store, "bucket_close/close") is not None


def test_a_loop_shows_that_it_lives_and_what_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has said last is still true; a cycle that takes long is told, though, as that of a dead loop was."""
    store = open_store(str(tmp_path))
    monkeypatch.setattr(loop, "SAY_EVERY_S", 0.01)
    begun = time.time()
    with SignOfLife(store, "bucket_close", "close", lambda: "shop.a", {"error": None}) as life:
        life.say({"tables": {"shop.b": {"error": None}}, "error": None})
        first = read_status(store, "bucket_close/close")
        assert first is not None
        assert "busy" not in first
        while (later := read_status(store, "bucket_close/close")) in (first, None):
            assert time.time() < begun + 20
    assert later is not None
    busy = later["busy"]
    assert (later["tables"], busy["with"]) == (first["tables"], "shop.a")
    assert abs(busy["since_ms"] - first["at_ms"]) < 1000
    lately, long_ago = (
        problems(
            {"bucket_close/close": {**later, "at_ms": busy["since_ms"] + seconds * 1000}},
            {},
            Expected.of_commit_logs([]),
            False,
            0.0,
        )
        for seconds in (30, 95)
    )
    (stuck,) = set(long_ago) - set(lately)
    assert stuck.text == "bucket_close/close: its cycle has not ended for 95 s, and is at shop.a: all else waits"
    threads = threading.active_count()
    with SignOfLife(store, "bucket_close", "close", lambda: None, {"error": None}):
        pass
    assert threading.active_count() == threads


def test_a_loop_that_is_killed_in_each_first_cycle_is_known_by_its_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(str(tmp_path))
    monkeypatch.setattr(loop, "SAY_EVERY_S", 0.01)
    ended_ms = int(time.time() * 1000) - 90_000
    said = {"at_ms": ended_ms, "tables": {"shop.a": {"error": None}}, "error": None}
    store.put("status/bucket_close/close.json", json.dumps(said).encode())
    for _ in range(2):
        with SignOfLife(store, "bucket_close", "close", lambda: None, {"tables": {}, "error": None}):
            begun = time.time()
            while (now := read_status(store, "bucket_close/close")) is None or now["at_ms"] < begun * 1000 - 1:
                assert time.time() < begun + 20
        assert now["tables"] == said["tables"]
        assert now["busy"]["since_ms"] == ended_ms
        found = problems({"bucket_close/close": now}, {}, EXPECTED, False, time.time())
        assert any("its cycle has not ended for 9" in problem.text for problem in found)


def test_a_loop_that_has_never_ended_a_cycle_says_what_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(str(tmp_path))
    monkeypatch.setattr(loop, "SAY_EVERY_S", 0.01)
    begun = time.time()
    with SignOfLife(store, "bucket_close", "close", lambda: None, {"tables": {}, "error": None}):
        while (now := read_status(store, "bucket_close/close")) is None:
            assert time.time() < begun + 20
    assert (now["tables"], now["error"]) == ({}, None)


class Away:
    """A store that cannot be asked from some second on, until another."""

    def __init__(self, store: ObjectStore, clock: list[float], since: float, until: float) -> None:
        self._store, self._clock, self._since, self._until = store, clock, since, until

    def __getattr__(self, name: str) -> Any:
        if self._since <= self._clock[0] < self._until:
            raise UnavailableError("[Errno 116] Stale file handle")
        return getattr(self._store, name)


@pytest.mark.parametrize(("seconds", "ends_at"), [(4, 600.0), (50, 600.0), (400, 78.0)])
def test_a_loop_outlives_a_store_that_is_away(tmp_path: Path, seconds: int, ends_at: float) -> None:
    """It waits a minute at short intervals, and then ends so that it is started again, in this same run."""
    clock = [0.0]
    store: Any = Away(open_store(str(tmp_path)), clock, 20, 20 + seconds)

    def sleep(pause: float) -> None:
        clock[0] += pause

    @starts_again()
    def run(_: Any) -> tuple[Report, ExitCode]:
        patience = Patience()
        for _ in cycles(running(store, 600.0), 2000, lambda: clock[0], sleep):
            error = patience.tried(lambda: store.list("plans/"))
            put_status(store, "commitlog_stage", "default", {"nodes": {}, "error": error})
        return {}, ExitCode.OK

    found: Any = SimpleNamespace(name="commitlog_stage", run="r", store=store, table=None, patterns=())
    code = application._run(found, run)
    assert clock[0] == pytest.approx(ends_at, abs=2)
    assert code == (ExitCode.OK if ends_at == 600 else ExitCode.INTERRUPTED)
    assert code == ExitCode.OK or explain_failure("x", f"Error code is: {int(code)}.\nringsync: error: x").may_retry


AWAY = [UnavailableError("no route"), UnreachableError("no node"), StateUnavailableError("timeout")]


@pytest.mark.parametrize("error", AWAY)
def test_what_is_away_when_a_loop_begins_does_not_end_its_run(error: Exception) -> None:
    @starts_again()
    def run() -> None:
        raise error

    with pytest.raises(AwayError) as raised:
        run()
    assert raised.value.code == ExitCode.INTERRUPTED


_LOOPS: list[tuple[str, Any, list[str]]] = [
    ("bucket_close", bucket_close, []),
    ("commitlog_stage", commitlog_stage, ["--queue=default"]),
    ("out_of_sequence", out_of_sequence, []),
    ("schema_update", schema_update, []),
]


@pytest.mark.parametrize(("name", "step", "options"), _LOOPS)
@pytest.mark.parametrize("credentials", ["no metadata server", "no key file", "half a key file"])
def test_a_store_whose_credentials_are_away_when_a_loop_begins_does_not_end_its_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    name: str,
    step: Any,
    options: list[str],
    credentials: str,
) -> None:
    """A key file is just being replaced; the metadata server of the machine is silent for a moment."""
    store, key = {"url": "gs://bucket/lake"}, tmp_path / "key.json"
    if credentials == "no metadata server":
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key))
    else:
        store["gcs_credentials_file"] = str(key)
    if credentials == "half a key file":
        key.write_text('{"type": "service_acc')
    document = {"server_name": "test", "cassandra": {"contact_points": ["127.0.0.1"]}, "store": store}
    (tmp_path / "ringsync.yaml").write_text(yaml.safe_dump(document))
    arguments = ["--conf", str(tmp_path / "ringsync.yaml"), "--run", "r", *options]

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--queue")

    code = application.run_application(name, "", step.run, arguments, add, of_table=False)
    assert code == ExitCode.INTERRUPTED
    error = capfd.readouterr().err
    assert error.startswith("ringsync: error: ")
    assert "gcs_credentials_file" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("error", [LayoutError("of another version"), ClusterError("no"), StepError("counts")])
def test_what_does_not_pass_by_itself_does(error: Exception) -> None:
    @starts_again()
    def run() -> None:
        raise error

    with pytest.raises(type(error)):
        run()


@pytest.mark.parametrize(
    ("error", "raised"),
    [(Unauthorized("User ringsync has no CREATE permission"), StateError), (Unavailable("no quorum"), AwayError)],
)
def test_missing_rights_are_not_away(error: Exception, raised: type[Exception]) -> None:
    """They were tried again a hundred times."""

    def execute(cql: str, *_: Any) -> list[Any]:
        if "system_schema" in cql:
            return []
        raise error

    cluster: Any = SimpleNamespace(execute=execute)
    with pytest.raises(raised, match="GRANT SELECT, MODIFY"), starts_again():
        StateSession(cluster, "cdc", lambda _: None).create({"class": "SimpleStrategy"})


def test_a_loop_waits_two_minutes_for_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    settings: Any = None

    def sleep(pause: float) -> None:
        clock[0] += pause

    def away(_: Any) -> Any:
        raise UnreachableError("no node")

    monkeypatch.setattr(loop, "connect", away)
    times = SimpleNamespace(monotonic=lambda: clock[0], time=lambda: 1_000.0 + clock[0])
    monkeypatch.setattr(loop, "time", times)
    with pytest.raises(UnreachableError):
        connect_patiently(lambda: settings, sleep=sleep)
    assert clock[0] == PATIENCE_S == 120


def test_secrets_and_certificates_that_are_just_being_replaced_end_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at its begin, nor in a cycle; a file that stays away is told in the end, as what it is."""
    gone: list[Exception] = [
        ConfigError("cassandra.password: cannot read the secret's file"),
        ClusterError("cannot read the TLS file ca.pem (cassandra.tls)"),
        ClusterError("the cluster refused user ringsync"),
    ]

    def settings() -> Any:
        if gone and isinstance(gone[0], ConfigError):
            raise gone.pop(0)

    def connect(_: Any) -> Any:
        if gone:
            raise gone.pop(0)
        return "session"

    monkeypatch.setattr(loop, "connect", connect)
    slept: list[float] = []
    assert connect_patiently(settings, sleep=slept.append) == "session"
    assert slept == [REFUSED_S] * 3

    def cycle() -> None:
        raise ConfigError("kafka.password: cannot read the secret's file")

    patience = Patience()
    assert [patience.tried(cycle) for _ in range(MAX_FAILURES - 1)][-1]
    assert patience.tried(lambda: None) is None
    for _ in range(MAX_FAILURES - 1):
        patience.tried(cycle)
    with pytest.raises(ConfigError, match=r"kafka\.password"):
        patience.tried(cycle)


_BAD = 'Failed to authenticate to 10.0.0.2:9042: Error from server: code=0100 [Bad credentials] message="{}"'


@pytest.mark.parametrize(
    ("said", "raised"),
    [
        ("Provided username ringsync and/or password are incorrect", ClusterError),
        ("Username and/or password are incorrect", ClusterError),
        ("Unable to perform authentication: Cannot achieve consistency level LOCAL_ONE", AwayError),
        ("Unable to perform authentication: Operation timed out - received only 0 responses.", AwayError),
        ("Failed to login. Please re-try.", AwayError),
    ],
)
def test_a_cluster_that_cannot_check_a_password_is_away(
    monkeypatch: pytest.MonkeyPatch, said: str, raised: type[Exception]
) -> None:
    """As while a node with the replica of ``system_auth`` restarts. A wrong password may be replaced, too, but if not
    it is told as what it is."""
    causes = {
        "10.0.0.1:9042": ConnectionRefusedError(111, "Connection refused"),
        "10.0.0.2:9042": AuthenticationFailed(_BAD.format(said)),
    }

    def refuse() -> Any:
        raise NoHostAvailable("Unable to connect to any servers", causes)

    no_hosts = SimpleNamespace(all_hosts=lambda: [])
    cluster = SimpleNamespace(connect=refuse, metadata=no_hosts, shutdown=lambda: None)
    monkeypatch.setattr(session, "Cluster", lambda **_: cluster)
    settings, waited = session.ClusterSettings(("10.0.0.1", "10.0.0.2"), username="ringsync", password="x"), []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        clock[0] += seconds

    clock = [0.0]
    times = SimpleNamespace(monotonic=lambda: clock[0], time=lambda: 1_000.0 + clock[0])
    monkeypatch.setattr(loop, "time", times)
    with pytest.raises(raised, match="ringsync") as told, starts_again():
        connect_patiently(lambda: settings, sleep=sleep)
    assert sum(waited) == PATIENCE_S
    assert raised is ClusterError or said in str(told.value)


def test_a_cycle_that_hangs_ends_its_process_and_shows_where(tmp_path: Path) -> None:
    """Airflow's own limit is longer than a run, which takes hours."""
    program = f"""
from types import SimpleNamespace
from ringsync.steps import loop
from ringsync.storage.local import LocalStore
config = SimpleNamespace(sync=SimpleNamespace(run_s=3600))
application = SimpleNamespace(config=config, store=LocalStore({str(tmp_path)!r}), outdated=lambda: bool)
loop.STUCK_S = 0.5
for number in loop.cycles(application, 100):
    if number == 8:
        import threading
        def waits_for_ever(): threading.Event().wait()
        waits_for_ever()
"""
    begun = time.monotonic()
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 1
    assert "waits_for_ever" in run.stderr
    assert time.monotonic() - begun > 1, "eight cycles were no hang"
