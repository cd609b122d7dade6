"""Run Cassandra's own CommitLogReader in a JVM of its own on one core: see ReadCommitLog.java."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from peers.log import KEYSPACE, SETTINGS, creation
from peers.one_core import Passes, on_one_core

from servers import ServerError, last_lines
from servers.cassandra import MODULE_FLAGS, write_configuration
from servers.jars import fetch
from servers.java import find_java_home

HEAP_MB = 1024


def read(segments: Sequence[Path], passes: int, core: int, cache: Path, scratch: Path) -> Passes:
    """Read segments several times in one JVM, which compiles its code while it runs.

    :param core: number of the only core that the JVM may use
    :param cache: folder that keeps the jars
    :param scratch: folder for files that Cassandra's classes require
    :raises ServerError: the program cannot be compiled, or fails; with its last lines
    """
    jars = fetch(f"cassandra-{SETTINGS.version}", cache).resolve()
    java = find_java_home() / "bin"
    with tempfile.TemporaryDirectory(dir=scratch, prefix="reader.") as name:
        folder = Path(name).resolve()
        write_configuration(folder, SETTINGS)
        tables = folder / "tables.cql"
        tables.write_text("\n".join(creation()))
        source = str(Path(__file__).with_name("ReadCommitLog.java"))
        compiler = [str(java / "javac"), "-nowarn", "-cp", f"{jars}/*", "-d", str(folder), source]
        compiled = subprocess.run(compiler, capture_output=True, text=True, check=False)
        if compiled.returncode != 0:
            raise ServerError(
                f"ReadCommitLog.java cannot be compiled:\n{last_lines(compiled.stdout + compiled.stderr)}"
            )
        command = [
            *(str(java / "java"), *MODULE_FLAGS, "-XX:ActiveProcessorCount=1", "-XX:+UseSerialGC", f"-Xmx{HEAP_MB}m"),
            *(f"-Dcassandra.config={(folder / 'cassandra.yaml').as_uri()}", f"-Dcassandra.storagedir={folder}"),
            *(f"-Dlogback.configurationFile={folder / 'logback-off.xml'}", "-cp", f"{folder}:{jars}/*"),
            *("ReadCommitLog", KEYSPACE, str(tables), str(passes), *map(str, segments)),
        ]
        return on_one_core(command, core, "Cassandra's CommitLogReader")
