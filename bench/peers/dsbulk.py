"""Run ``dsbulk unload`` to CSV files.

The program starts, reads and ends. Its start-up is measured by unloading an empty table of the same kind; this wall
clock and CPU time is subtracted.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

from peers.measure import Measurement, cpu_seconds
from peers.table import EMPTY_TABLE, KEYSPACE, TABLE

from servers import ServerError, last_lines
from servers.cassandra import CassandraNode
from servers.jars import fetch
from servers.java import find_java_home

MAIN_CLASS = "com.datastax.oss.dsbulk.runner.DataStaxBulkLoader"
HEAP_MB = 1024


def unload(node: CassandraNode, page_size: int, scratch: Path, *, times: bool) -> Measurement:
    """Unload the table once.

    :param page_size: rows per result page
    :param scratch: folder for the CSV files, which are deleted at the end
    :param times: whether to unload writetimes and TTLs, too
    """
    start_up = run(node, EMPTY_TABLE, page_size, scratch, times)
    whole = run(node, TABLE, page_size, scratch, times)
    return Measurement(
        rows=whole.rows,
        seconds=whole.seconds - start_up.seconds,
        client_seconds=whole.client_seconds - start_up.client_seconds,
        server_seconds=whole.server_seconds - start_up.server_seconds,
        written_bytes=whole.written_bytes,
    )


def run(node: CassandraNode, table: str, page_size: int, scratch: Path, times: bool) -> Measurement:
    """Run dsbulk once, from the start of its JVM to its end.

    :raises ServerError: it fails; with its last lines
    """
    jars = fetch("dsbulk", node.cache)
    with tempfile.TemporaryDirectory(dir=scratch, prefix="dsbulk.") as folder:
        command = [
            *(str(find_java_home() / "bin" / "java"), f"-Xmx{HEAP_MB}m", "-cp", f"{jars.resolve()}/*", MAIN_CLASS),
            *("unload", "-h", f'["{node.contact_point}:{node.port}"]', "-k", KEYSPACE, "-t", table),
            *("-url", f"{folder}/csv", "--log.directory", f"{folder}/logs", "-cl", "LOCAL_ONE"),
            *("--driver.basic.request.page-size", str(page_size), "--driver.basic.request.timeout", "60 seconds"),
            *(["--schema.preserveTimestamp", "true", "--schema.preserveTtl", "true"] if times else []),
        ]
        with Path(folder, "output").open("wb") as output:
            server, began = cpu_seconds(node.pid), time.monotonic()
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder)
            _, status, usage = os.wait4(process.pid, 0)
            seconds, server = time.monotonic() - began, cpu_seconds(node.pid) - server
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise ServerError(f"dsbulk failed:\n{last_lines(Path(folder, 'output').read_text(errors='replace'))}")
        files = list(Path(folder, "csv").glob("*.csv"))
        return Measurement(
            rows=sum(lines(file) - 1 for file in files),  # every file begins with the columns' names
            seconds=seconds,
            client_seconds=usage.ru_utime + usage.ru_stime,
            server_seconds=server,
            written_bytes=sum(file.stat().st_size for file in files),
        )


def lines(file: Path) -> int:
    with file.open("rb") as opened:
        return sum(block.count(b"\n") for block in iter(lambda: opened.read(1 << 20), b""))
