"""Loops: how long they work, and what ends them."""

from pathlib import Path

import pytest

from ringsync.status import STOP_KEY
from ringsync.steps.loop import cycles, put_metrics, put_status, seconds_left
from ringsync.storage import open_store


@pytest.mark.parametrize(
    ("until", "seconds"), [(None, 600.0), (1_100.0, 100.0), (1_000.0, 0.0), (900.0, 0.0), (9_000.0, 600.0)]
)
def test_a_loop_ends_with_the_others_of_its_run(until: float | None, seconds: float) -> None:
    assert seconds_left(600.0, until, now_s=1_000.0) == seconds


def test_a_loop_ends_when_its_time_is_over_or_somebody_asks(tmp_path: Path) -> None:
    store, clock = open_store(str(tmp_path)), [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    assert list(cycles(store, 10.0, 2.0, lambda: clock[0], sleep)) == [0, 1, 2, 3, 4, 5]
    assert list(cycles(store, 0.0, 2.0, lambda: clock[0], sleep)) == [0]
    store.put(STOP_KEY, b"{}")
    assert list(cycles(store, 10.0, 2.0, lambda: clock[0], sleep)) == [0]


def test_metrics_never_end_a_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, path = open_store(str(tmp_path / "lake")), tmp_path / "ringsync.prom"
    put_status(store, "bucket_close", "close", {"tables": {"a.b": {"last_pass": 3}}})
    put_metrics(store, None, 0)
    put_metrics(store, str(path), 1)
    assert not path.exists()
    put_metrics(store, str(path), 5)
    assert 'ringsync_table_pass{table="a.b"} 3' in path.read_text()
    put_metrics(store, str(tmp_path / "nowhere" / "x.prom"), 0)
    assert "ringsync: warning: metrics.prometheus_file: " in capsys.readouterr().out
