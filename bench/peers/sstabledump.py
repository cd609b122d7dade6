"""Run Cassandra's own sstabledump (tools/SSTableExport), which prints a line of JSON for each partition."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

from peers.one_core import Pass, Passes
from peers.sstables import SETTINGS

from servers import ServerError, last_lines
from servers.cassandra import MODULE_FLAGS, write_configuration
from servers.jars import fetch
from servers.java import find_java_home

HEAP_MB = 1024


def dump(data: Path, rows: int, core: int, cache: Path, scratch: Path) -> Passes:
    """Dump one SSTable, from the start of the JVM to its end.

    :param data: its Data.db
    :param rows: number of its rows
    :param core: number of the only core that the JVM may use
    :param cache: folder that keeps the jars
    :param scratch: folder for the output
    :raises ServerError: the program fails; with its last lines
    """
    jars = fetch(f"cassandra-{SETTINGS.version}", cache).resolve()
    with tempfile.TemporaryDirectory(dir=scratch, prefix="sstabledump.") as name:
        folder = Path(name).resolve()
        write_configuration(folder, SETTINGS)
        command = [
            *(str(find_java_home() / "bin" / "java"), *MODULE_FLAGS, "-XX:ActiveProcessorCount=1", "-XX:+UseSerialGC"),
            *(f"-Xmx{HEAP_MB}m", f"-Dcassandra.config={(folder / 'cassandra.yaml').as_uri()}"),
            *(f"-Dcassandra.storagedir={folder}", f"-Dlogback.configurationFile={folder / 'logback-off.xml'}"),
            *("-cp", f"{jars}/*", "org.apache.cassandra.tools.SSTableExport", str(data), "-l"),
        ]
        with (folder / "rows.json").open("wb") as output, tempfile.TemporaryFile("w+") as errors:
            began = time.monotonic()
            process = subprocess.Popen(
                command, stdout=output, stderr=errors, preexec_fn=lambda: os.sched_setaffinity(0, {core})
            )
            _, status, usage = os.wait4(process.pid, 0)
            seconds = time.monotonic() - began
            process.returncode = os.waitstatus_to_exitcode(status)
            errors.seek(0)
            if process.returncode != 0:
                raise ServerError(f"sstabledump failed:\n{last_lines(errors.read())}")
        cpu = usage.ru_utime + usage.ru_stime
        written = (folder / "rows.json").stat().st_size
    return Passes((Pass(seconds, cpu, rows, rows, 0, written),), None, seconds, cpu, usage.ru_maxrss / 1024)
