"""The cache of jars: finished or not there at all, whatever happened; and clear words when it cannot be filled."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from servers import ServerError, jars, java
from servers.jars import COMPLETED, POMS, fetch, ivy_module

FAKE_MAVEN = """#!/bin/sh
for argument in "$@"; do case "$argument" in -DoutputDirectory=*) folder="${argument#*=}";; esac; done
echo run >> "$(dirname "$0")/runs"
echo content > "$folder/delta-1.jar"
echo content > "$folder/netty-1-osx-x86_64.jar"
"""


@pytest.fixture
def maven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the program `mvn`, so that these tests need no network; it counts its runs in a file."""
    program = tmp_path / "bin" / "mvn"
    program.parent.mkdir()
    program.write_text(FAKE_MAVEN)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("JAVA_HOME", str(java.find_java_home()))
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return program


def runs(maven: Path) -> int:
    return len((maven.parent / "runs").read_text().splitlines())


def test_fetches_once_and_drops_other_platforms(tmp_path: Path, maven: Path) -> None:
    folder = fetch("delta", tmp_path / "cache")
    assert fetch("delta", tmp_path / "cache") == folder
    assert sorted(path.name for path in folder.iterdir()) == [COMPLETED, "delta-1.jar"]
    assert runs(maven) == 1


@pytest.mark.parametrize("damage", ["marker lost", "marker cut", "jar lost", "jar cut", "other pom"])
def test_a_broken_cache_is_fetched_again(tmp_path: Path, maven: Path, damage: str) -> None:
    folder = fetch("delta", tmp_path / "cache")
    marker, jar = folder / COMPLETED, folder / "delta-1.jar"
    if damage == "marker lost":
        marker.unlink()
    elif damage == "marker cut":
        marker.write_text(marker.read_text()[:20])
    elif damage == "jar lost":
        jar.unlink()
    elif damage == "jar cut":
        jar.write_text("con")
    else:
        marker.write_text(json.dumps(json.loads(marker.read_text()) | {"pom": "another"}))
    fetch("delta", tmp_path / "cache")
    assert jar.read_text() == "content\n"
    assert runs(maven) == 2


def test_two_processes_fetch_once(tmp_path: Path, maven: Path) -> None:
    maven.write_text(FAKE_MAVEN + "sleep 0.5\n")
    with multiprocessing.get_context("fork").Pool(2) as pool:
        folders = pool.starmap(fetch, [("delta", tmp_path / "cache")] * 2)
    assert folders[0] == folders[1]
    assert runs(maven) == 1


def test_a_failure_shows_the_clients_own_words_and_leaves_nothing(tmp_path: Path, maven: Path) -> None:
    maven.write_text("#!/bin/sh\necho 'Could not transfer artifact: Unknown host'\nexit 1\n")
    with pytest.raises(ServerError, match=r"(?s)Maven could not fetch delta \(exit code 1\).*network.*Unknown host"):
        fetch("delta", tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / "jars").iterdir()] == ["delta.lock"]


def test_no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerError, match=r"No java found.*Install a JDK 17"):
        fetch("delta", tmp_path / "cache")


def test_another_java(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_402\"' >&2\n")
    program.chmod(0o755)
    with pytest.raises(ServerError, match=r"is Java 8, but Java 17 is needed"):
        java.find_java_home({"JAVA_HOME": str(tmp_path)})
    with pytest.raises(ServerError, match=r"no bin/java in it"):
        java.find_java_home({"JAVA_HOME": str(tmp_path / "bin")})


def test_a_full_disk(tmp_path: Path, maven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jars, "FREE_BYTES_NEEDED", 1 << 62)
    with pytest.raises(ServerError, match="MiB are free"):
        fetch("delta", tmp_path / "cache")


def test_an_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(
        ServerError, match=r"'cassandra-3\.0'; known are apicurio, cassandra-4\.0, cassandra-4\.1, cassandra-5\.0"
    ):
        fetch("cassandra-3.0", tmp_path)


def test_ivy_asks_for_the_same_versions() -> None:
    assert 'name="cassandra-all" rev="5.0.9"' in ivy_module(POMS / "cassandra-5.0.xml")
    assert ivy_module(POMS / "delta.xml").count('transitive="false"') == 7
    assert 'classifier="shaded"' in ivy_module(POMS / "gcs.xml")


def test_a_jar_with_dependencies_is_fetched_alone(tmp_path: Path, maven: Path) -> None:
    maven.write_text(
        "#!/bin/sh\n"
        'for argument in "$@"; do case "$argument" in -Dmaven.repo.local=*) folder="${argument#*=}";; esac; done\n'
        'mkdir -p "$folder/io" && echo content > "$folder/io/dbz-1-jar-with-dependencies.jar" && '
        'echo plugin > "$folder/io/plugin.jar"\n'
        'echo "$@" > "$(dirname "$0")/arguments"\n'
    )
    folder = fetch("debezium-cassandra-5", tmp_path / "cache")
    assert sorted(path.name for path in folder.iterdir()) == [COMPLETED, "dbz-1-jar-with-dependencies.jar"]
    arguments = (maven.parent / "arguments").read_text()
    assert "-Dtransitive=false" in arguments
    assert ":jar:jar-with-dependencies " in arguments


def test_only_maven_fetches_a_jar_with_dependencies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java.find_java_home()))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerError, match="Only Maven can fetch debezium-cassandra-5"):
        fetch("debezium-cassandra-5", tmp_path / "cache")
