"""Tasks that end, fail or hang: what Airflow is told, and that none runs for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.dags.tasks import ROOT, RUN, rendered


@pytest.mark.parametrize(("code", "is_final"), [(0, None), (1, True), (3, True), (4, False), (-9, False)])
def test_a_process_without_spark(
    bag: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_final: Any
) -> None:
    from airflow.sdk.exceptions import AirflowException, AirflowFailException

    task = rendered(bag, "commitlog_archive", "archive", {})
    module = sys.modules[type(task).__module__]
    monkeypatch.setattr(module, "prepare_environment", lambda *_, **__: None)
    monkeypatch.setattr("ringsync.orchestration.LOOP_REST_S", 0.0)
    reported: list[str] = []
    monkeypatch.setattr(module, "send_report", lambda _, key, *__: reported.append(key))
    script = tmp_path / "application.py"
    script.write_text(
        "import os, sys\nprint('ringsync: error: no room', file=sys.stderr)\nprint('ringsync: report: {}')\n"
        f"os.kill(os.getpid(), 9) if {code} < 0 else sys.exit({code})\n"
    )
    assert (ROOT / "spark_apps" / "commitlog_archive.py").samefile(task.path)
    task.path = str(script)
    if is_final is None:
        task.execute({})
    else:
        with pytest.raises(AirflowException, match="no room") as raised:
            task.execute({})
        assert isinstance(raised.value, AirflowFailException) == is_final
    assert reported == [f"reports/commitlog_archive/{RUN}.default.json"]


def test_no_task_that_starts_something_runs_for_ever(bag: Any) -> None:
    loop = 4.5  # sync.run_s, and half an hour to end
    hours = {
        **{"prepare": 168, "snapshot_default": 24, "scan": 168, "drain": 168, "verify": 168, "snapshots_ended": None},
        **{
            "reprocess": 24,
            "merge": 24,
            "archive": 4 + 5 / 60,
            "watch": 4 + 5 / 60,
        },  # sync.run_s, and five minutes to end
        **dict.fromkeys(("close", "stage", "publish", "update"), loop),
    }
    tasks = [task for dag in bag.dags.values() for task in dag.tasks]
    assert {task.task_id for task in tasks} == hours.keys()
    for task in tasks:
        longest = task.execution_timeout
        assert (longest and longest.total_seconds() / 3600) == pytest.approx(hours[task.task_id]), task.task_id


@pytest.mark.parametrize("ends", ["at once", "when killed", "never"])
@pytest.mark.parametrize(("dag_id", "task_id", "conf", "said"), [
    ("bootstrap_table", "snapshot_default", {"table": "shop.orders", "mode": "sstable"},
     r"did not end in 2 s \(sstable.task_timeout_h\), and was stopped: .* The scan reads the snapshots that are there"),
    ("commitlog_archive", "archive", {},
     r"did not end in 2 s \(sync.run_s\), and was stopped: .* The next try goes on where it was"),
])  # fmt: skip
def test_a_process_that_hangs_is_stopped(
    *, bag: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    dag_id: str, task_id: str, conf: dict[str, Any], said: str, ends: str,
) -> None:  # fmt: skip
    """By Airflow's own clock; also one that no signal ends, as when a disk does not answer."""
    from airflow.sdk.exceptions import AirflowException, AirflowFailException
    from airflow.sdk.execution_time.timeout import timeout

    task = rendered(bag, dag_id, task_id, conf)
    module, bounds = sys.modules[type(task).__module__], sys.modules["ringsync_bounds"]
    monkeypatch.setattr(module, "prepare_environment", lambda *_, **__: None)
    monkeypatch.setattr(bounds, "END_S", 0.5)
    script = tmp_path / "application.py"
    ignores = "" if ends == "at once" else "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    script.write_text(f"{ignores}import time\nprint('asking the node', flush=True)\ntime.sleep(60)\n")
    task.path, task.execution_timeout = str(script), timedelta(seconds=2)
    if ends == "never":
        monkeypatch.setattr(subprocess.Popen, "kill", lambda _: None)
    began_s = time.monotonic()
    with pytest.raises(AirflowException, match=said) as raised, timeout(2):
        task.execute({})
    assert 2 <= time.monotonic() - began_s < 6
    assert isinstance(raised.value, AirflowFailException) == (task_id != "archive")  # a loop begins again
    assert (task._process.poll() is None) == (ends == "never")
    if ends == "never":
        os.kill(task._process.pid, 9)
        task._process.wait()


def test_an_application_that_hangs_is_stopped(bag: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow.sdk.exceptions import AirflowFailException
    from airflow.sdk.execution_time.timeout import timeout

    submit = tmp_path / "spark-submit"
    submit.write_text("#!/bin/sh\necho ringsync: asking the node\nexec sleep 60\n")
    submit.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    task = rendered(bag, "bootstrap_table", "prepare", {"table": "shop.orders"})
    module = sys.modules[type(task).__module__]
    monkeypatch.setattr(module, "prepare_environment", lambda *_, **__: None)
    reports: list[object] = []
    monkeypatch.setattr(module, "send_report", lambda *about: reports.append(about))
    task.execution_timeout = timedelta(seconds=3)
    said = r"did not end in 3 s \(scan.task_timeout_h\), and was stopped: .* raise the setting; run it again"
    with pytest.raises(AirflowFailException, match=said), timeout(3):
        task.execute({})
    assert task._hook._submit_sp.wait(5) == -9
    assert not reports, "what hangs may be the store, which the report is in, too"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_driver_ends_with_its_jvm(tmp_path: Path) -> None:
    """Airflow's operator kills spark-submit only. What it has started must not work on, whatever it waits for."""
    conf = tmp_path / "ringsync.yaml"
    conf.write_text(f"server_name: x\ncassandra: {{contact_points: [127.0.0.1]}}\nstore: {{url: {tmp_path}}}\n")
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import sys, time\nfrom ringsync.steps.application import run_application\n"
        "def step(_):\n    print('working', flush=True)\n    time.sleep(600)\n"
        f"run_application('x', '', step, ['--conf', {str(conf)!r}, '--run', 'r'], of_table=False)\n"
    )
    jvm = tmp_path / "jvm.py"
    jvm.write_text(
        f"import subprocess, sys\nchild = subprocess.Popen([sys.executable, {str(driver)!r}], stdout=subprocess.PIPE)\n"
        "print(child.pid, child.stdout.readline().decode().strip(), flush=True)\nchild.wait()\n"
    )
    environment = {**os.environ, "PYSPARK_GATEWAY_PORT": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, str(jvm)], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pid, said = parent.stdout.readline().split()
        assert said == "working"
        parent.kill()
    deadline_s = time.monotonic() + 10
    while _is_alive(int(pid)):
        assert time.monotonic() < deadline_s, "it works on without its JVM"
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended may still be waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
