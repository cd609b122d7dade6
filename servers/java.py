"""Find the Java that the servers and Spark run on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from servers import ServerError

JAVA_VERSION = 17
"""Cassandra 4.0, 4.1 and 5.0, Spark 4.2 and Ivy all run on it (Cassandra 4.x only with extra JVM flags)."""

ADVICE = (
    f"Install a JDK {JAVA_VERSION} (Debian and Ubuntu: openjdk-{JAVA_VERSION}-jdk-headless) or point JAVA_HOME to one."
)


def find_java_home(environment: Mapping[str, str] = os.environ) -> Path:
    """
    Return the home of JDK 17: `JAVA_HOME` if it is set, else that of the `java` on `PATH`.

    :param environment: the environment variables to look at.
    :raises ServerError: there is no Java, or its version is not 17.
    """
    named = environment.get("JAVA_HOME")
    if named:
        executable = Path(named) / "bin" / "java"
        if not executable.is_file():
            raise ServerError(f"JAVA_HOME is {named}, but there is no bin/java in it. {ADVICE}")
    else:
        on_path = shutil.which("java", path=environment.get("PATH", ""))
        if on_path is None:
            raise ServerError(f"No java found: JAVA_HOME is not set and there is no java on PATH. {ADVICE}")
        executable = Path(on_path).resolve()
    version = java_version(executable)
    if version != JAVA_VERSION:
        raise ServerError(f"{executable} is Java {version}, but Java {JAVA_VERSION} is needed. {ADVICE}")
    return executable.parent.parent


def java_version(executable: Path) -> int:
    """
    Return the feature release of a Java, for example 17 (and 8 for a Java that calls itself 1.8).

    :param executable: the `java` program.
    :raises ServerError: it does not run, or prints no version.
    """
    try:
        answer = subprocess.run([executable, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerError(f"{executable} does not run: {error}. {ADVICE}") from error
    found = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    if found is None:
        raise ServerError(f"{executable} -version prints no version. {ADVICE}")
    return int(found[1])
