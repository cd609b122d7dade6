"""When a run of the archive ends: after hours, or earlier, if something is unread or the configuration has changed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.config import load_config
from ringsync.steps.application import Application, ExitCode
from ringsync.steps.archive import commitlog_archive
from ringsync.steps.archive.committed import Committed
from ringsync.storage.local import LocalStore
from tests.steps.test_archive import Nodes, fill


class Stopwatch:
    """Stands for the module ``time`` of the archive and its cycles: sleeping and uploading move it."""

    def __init__(self) -> None:
        self.now_s, self.began_s = 0.0, time.time()

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.began_s + self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += max(seconds, 0.5)


@pytest.fixture
def archive_s(raw: Path, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the archive of four hours, and tell how long it worked; each upload takes a minute."""
    watch, archived = Stopwatch(), commitlog_archive.archive_segment
    monkeypatch.setattr(commitlog_archive, "time", watch)
    monkeypatch.setattr(commitlog_archive, "_Cluster", lambda config: Nodes({"a": raw}))
    monkeypatch.setattr(commitlog_archive, "ClearsAside", lambda *_: SimpleNamespace(clear=lambda: None))
    monkeypatch.setattr("ringsync.steps.loop.cycles.__defaults__", (watch.monotonic, watch.sleep))

    def slow(*given: Any, **named: Any) -> Any:
        watch.now_s += 60
        uploaded(watch.now_s)
        return archived(*given, **named)

    monkeypatch.setattr(commitlog_archive, "archive_segment", slow)
    conf = tmp_path / "ringsync.yaml"
    conf.write_text(f"server_name: s\ncassandra: {{contact_points: [a]}}\nstore: {{url: {store.url}}}\n")
    os.utime(conf, (0, 0))

    def uploaded(now_s: float) -> None:
        for at_s, text in changes.items():
            if now_s >= at_s:
                conf.write_text(conf.read_text() + text)
                os.utime(conf, (at_s, at_s))
                del changes[at_s]
                return

    changes: dict[float, str] = {}

    def run(policy: str, later: dict[float, str] | None = None) -> tuple[float, dict[str, Any]]:
        changes.update(later or {})
        text = f"archive: {{policy: {policy}, uploads: 1, poll_interval_ms: 60000}}\n"
        conf.write_text(conf.read_text() + text)
        os.utime(conf, (0, 0))
        given: Any = (load_config(conf), store, None, "run", SimpleNamespace(queue="default"))
        report, code = commitlog_archive.run(Application("commitlog_archive", str(conf), *given))
        assert code == ExitCode.OK
        return watch.now_s, report

    return run


def test_a_run_that_has_archived_what_nobody_has_read_ends_after_ten_minutes(raw: Path, archive_s: Any) -> None:
    """Its end lets ``archive_reprocess`` begin."""
    fill(raw, 3)
    worked_s, report = archive_s("always")
    assert 600 <= worked_s < 700
    assert (report["segments"], report["unread"]) == (3, 3)


def test_so_does_one_that_has_much_to_archive(raw: Path, archive_s: Any) -> None:
    """Its cycle lasts until all is archived."""
    files = fill(raw, 30)
    worked_s, report = archive_s("always")
    assert 600 <= worked_s < 700
    assert report["unread"] == 10
    assert sum(file.exists() for file in files) > 15


def test_a_run_whose_segments_were_read_works_to_its_end(
    raw: Path, archive_s: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(raw, 3)
    monkeypatch.setattr(Committed, "has", lambda *_: True)
    worked_s, report = archive_s("always")
    assert worked_s >= 14_400
    assert (report["segments"], report["unread"]) == (3, 0)


def test_a_run_with_nothing_to_archive_works_to_its_end(raw: Path, archive_s: Any) -> None:
    fill(raw, 3)
    worked_s, report = archive_s("off")
    assert worked_s >= 14_400
    assert (report["segments"], report["unread"]) == (0, 0)


def test_a_wrong_configuration_ends_no_run_and_is_told(raw: Path, archive_s: Any) -> None:
    fill(raw, 30)
    worked_s, report = archive_s("always", {120.0: "kafca: null\n"})
    assert worked_s >= 600, "this one is wrong"
    assert "kafca: unknown key" in report["config_error"]


def test_a_good_one_ends_also_a_run_that_has_much_to_archive(raw: Path, archive_s: Any) -> None:
    """It said that uploads may take less of the network; they took it for hours."""
    fill(raw, 30)
    worked_s, report = archive_s("always", {120.0: "metrics: {prometheus_file: x.prom}\n"})
    assert worked_s < 240
    assert report["config_error"] == ""
