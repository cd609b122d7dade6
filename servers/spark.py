"""Java options that make short Spark applications cheap: one compiler, a small collector, an archive of classes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from servers import ServerError, last_lines
from servers.jars import DEFAULT_CACHE, fetch
from servers.java import find_java_home

LEAN_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
ARCHIVE_SECONDS = 300

TYPICAL_WORK = """
import sys
from ringsync.replica.session import spark_session
spark = spark_session("class archive", jars=sys.argv[2:], master="local[1]")
rows = spark.range(10).selectExpr("id AS token", "array(id) AS a", "named_struct('b', 'c') AS s")
rows.writeTo("delta.`" + sys.argv[1] + "`").using("delta").createOrReplace()
found = spark.read.format("delta").load(sys.argv[1])
found.mapInArrow(lambda batches: batches, found.schema).toArrow()
spark.sql("DESCRIBE HISTORY delta.`" + sys.argv[1] + "`").collect()
spark.stop()
"""


def lean_java_options(cache: Path, jars: list[Path]) -> str:
    """
    Return Java options (for `JDK_JAVA_OPTIONS`) for Spark applications that live about a minute.

    The first call makes an archive of the classes that such an application loads (half a minute, 200 MB); with it an
    application needs a third less CPU. The JVM goes on without the archive if it does not fit.

    :param cache: folder that keeps the archive.
    :param jars: Delta's jars.
    :raises ServerError: Spark does not run; with its last lines.
    """
    archive = cache.resolve() / "spark-classes.jsa"
    if not archive.exists():
        unfinished = archive.with_suffix(".unfinished")
        options = f"{LEAN_JVM} -XX:ArchiveClassesAtExit={unfinished}"
        environment = {
            **os.environ,
            "JDK_JAVA_OPTIONS": options,
            "JAVA_HOME": str(find_java_home()),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
        }
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", TYPICAL_WORK, f"{folder}/table", *map(str, jars)]
            done = subprocess.run(
                command,
                env=environment,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=ARCHIVE_SECONDS,
                check=False,
            )
        if done.returncode != 0 or not unfinished.exists():
            raise ServerError(f"Spark does not run:\n{last_lines(done.stdout + done.stderr)}")
        unfinished.replace(archive)
    return f"{LEAN_JVM} -XX:SharedArchiveFile={archive} -Xshare:auto"


if __name__ == "__main__":
    lean_java_options(DEFAULT_CACHE, sorted(fetch("delta", DEFAULT_CACHE).glob("*.jar")))
