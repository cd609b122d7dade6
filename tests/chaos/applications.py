"""Spark applications: as processes of their own, to be killed, and in this process, where nobody kills them."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from servers.jars import DEFAULT_CACHE, fetch
from servers.spark import lean_java_options

PROJECT = Path(__file__).parents[2]


def command(name: str, conf: Path, table: str, run: str, *options: str, tasks: int | None = None) -> list[str]:
    """The command that runs an application on a local Spark.

    :param tasks: that run at once; None: one for each core
    """
    application = str(PROJECT / "spark_apps" / f"{name}.py")
    spark_submit = [str(Path(sys.executable).parent / "spark-submit"), "--master", f"local[{tasks}]"]
    python = [sys.executable] if tasks is None else spark_submit
    return [*python, application, "--conf", str(conf), "--table", table, "--run", run, *options]


def environment() -> dict[str, str]:
    """Of the applications: they find the package, and their JVM starts lean."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(PROJECT / "include"), os.environ.get("PYTHONPATH")))),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "JDK_JAVA_OPTIONS": lean_java_options(DEFAULT_CACHE, sorted(fetch("delta", DEFAULT_CACHE).glob("*.jar"))),
    }


@contextmanager
def started(log: Path, *arguments: Any, tasks: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """An application that runs in a process group of its own, all of which has ended when this ends.

    :param log: file of what it prints
    :param arguments: of :func:`command`
    :param tasks: of :func:`command`
    """
    with log.open("ab") as out:
        process = subprocess.Popen(
            command(*arguments, tasks=tasks),
            env=environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            for pid in session_of(process.pid):
                _kill(pid)
            process.wait()


def finished(log: Path, *arguments: Any, tasks: int | None = None, timeout: float = 300) -> int:
    """Run an application to its end; gives the exit code."""
    with started(log, *arguments, tasks=tasks) as process:
        return process.wait(timeout)


def finished_here(name: str, conf: Path, table: str, run: str, *options: str) -> int:
    """Run an application to its end by the Spark of this process, which spares a JVM; gives the exit code.

    What the fixture ``spark`` has started is used: whoever calls this needs it.
    """
    main = runpy.run_path(str(PROJECT / "spark_apps" / f"{name}.py"))["main"]
    return int(main(["--conf", str(conf), "--table", table, "--run", run, *options]))


def java_of(pid: int) -> int | None:
    """The JVM among the processes of a session."""
    for child in session_of(pid):
        if _read(child, "comm").strip() == "java":
            return child
    return None


def session_of(session: int) -> list[int]:
    """All processes of a session, its leader first."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            fields = _read(int(entry.name), "stat").rpartition(")")[2].split()
            if len(fields) > 3 and int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return sorted(found, key=lambda pid: (pid != session, pid))


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
