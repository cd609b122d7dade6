"""What is installed on a host, as far as hosts that work together must agree: drivers, executors, workers of queues."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from functools import cache
from glob import glob
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE = Path(__file__).parent
LIBRARIES = ("pyarrow", "numpy", "numba", "cassandra-driver", "deltalake")
"""Libraries whose objects go from host to host, or that decide which bytes are written; Spark checks its own."""


@cache
def installed() -> Mapping[str, str]:
    """Return what this process runs, by name: ringsync, as a digest of its source; Python's version and those of the
    libraries; Java's, and the names of Spark's jars, where the environment says them."""
    found = {"ringsync": digest_of_source(), "python": "{}.{}".format(*sys.version_info)}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            found[library] = "missing"
    if java := _java(os.environ.get("JAVA_HOME", "")):
        found["java"] = java
    if jars := os.environ.get("RINGSYNC_SPARK_JARS"):
        named = {Path(jar).name for pattern in jars.split(",") for jar in glob(pattern) or [pattern]}
        found["jars"] = " ".join(sorted(named))
    return found


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """List what differs between two hosts, of what both say: ``python 3.11, not 3.12``."""
    both = [name for name in here if name in there and here[name] != there[name]]
    return [f"{name} {here[name]}, not {there[name]}" for name in both]


def digest_of_source() -> str:
    """Return a digest of the package's source: checkouts of one version may differ."""
    digest = blake2b(digest_size=6)
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(file.relative_to(PACKAGE).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _java(home: str) -> str:
    """Return the main version of a Java, ``17``; empty: unknown."""
    try:
        release = (Path(home) / "release").read_text()
    except OSError:
        return ""
    found = re.search(r'^JAVA_VERSION="(\d+)', release, re.MULTILINE)
    return found[1] if home and found else ""
