"""docker-compose.yaml by a real engine: built, started, used, each service restarted, removed. `make test-compose`."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer

from tests.compose import engine as engines
from tests.compose.engine import Engine, EngineError
from tests.compose.images import external_images, provide, settings_of_this_machine
from tests.compose.project import PATIENCE, SOURCE, Project, with_alternatives

pytestmark = pytest.mark.compose

CLIENT = "airflow-scheduler"
TABLE = "shop.orders"
WRITER = Path(__file__).parent / "write_rows.py"
ROWS, MORE = 2_000, 500
LONG_S = 1800 * PATIENCE
# What others need comes first, as they would on a machine that is serviced; Kafka and the emulator only if they run.
RESTARTED = ("postgres", "airflow-api", "airflow-dag-processor", "spark-master", "spark-worker", "airflow-scheduler")
NODES = ("cassandra-1", "cassandra-2", "cassandra-3")


def say(*words: object) -> None:
    """Show how far the test is, and what it has measured."""
    print(time.strftime("%H:%M:%S"), *words, flush=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    if reason := engines.why_not():
        pytest.skip(reason)
    found = Engine(SOURCE / ".cache" / "compose")
    found.prepare()
    try:
        version = found.podman("version", "--format", "{{.Client.Version}}").strip()
        say("podman", version)
    except EngineError as error:
        pytest.skip(f"podman does not run here: {error}")
    started = time.monotonic()
    for name, origin in provide(found, external_images(SOURCE), SOURCE / ".cache").items():
        say(name, origin)
    say(f"images after {time.monotonic() - started:.0f} s")
    yield found
    found.podman("image", "prune", "--force", timeout=600)  # of earlier states of the project, gigabytes each


@pytest.fixture
def project(engine: Engine, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Project]:
    """The project with the profiles that the test names; what it leaves in the engine is removed."""
    profiles = getattr(request, "param", ())
    found = Project(engine, tmp_path, "ringsync-test", profiles)
    found.down()  # what a killed test has left
    try:
        yield found
    finally:
        found.down()


def build(project: Project) -> None:
    started = time.monotonic()
    mounts = " ".join(settings_of_this_machine(project.engine.folder / "registries"))
    project.compose("build", options=(f"--podman-build-args={mounts}",), timeout=3600)
    say(f"built after {time.monotonic() - started:.0f} s")


def start(project: Project) -> None:
    started = time.monotonic()
    for name, seconds in project.up().items():
        say(f"  {name} healthy after {seconds:.0f} s")
    say(f"all healthy after {time.monotonic() - started:.0f} s")


def write(project: Project, first: int, count: int) -> None:
    project.engine.podman("cp", str(WRITER), f"{project.container(CLIENT)}:/tmp/write_rows.py")
    say(project.execute(CLIENT, "python", "/tmp/write_rows.py", str(first), str(count)).strip())


def cdcservice(project: Project, *arguments: str) -> str:
    started = time.monotonic()
    printed = project.execute(CLIENT, "cdcservice", *arguments, timeout=LONG_S)
    say(f"cdcservice {' '.join(arguments)}: {time.monotonic() - started:.0f} s")
    return printed


def caught_up(project: Project) -> None:
    """Wait until all that was written is published, and see that source and replica are equal."""
    cdcservice(project, "wait")
    assert "0 differences" in cdcservice(project, "verify", "--table", TABLE, "--wait")
    cdcservice(project, "status")


def follow_a_table(project: Project) -> None:
    """What the head of docker-compose.yaml says, and then some writes."""
    write(project, 0, ROWS)
    assert f"{ROWS:,} rows" in cdcservice(project, "bootstrap", "--table", TABLE, "--wait")
    cdcservice(project, "start")
    write(project, ROWS, MORE)
    caught_up(project)


def show_memory(project: Project) -> None:
    memory = project.memory_mib()
    say(f"memory: {sum(memory.values()):,} MiB", memory)


def test_a_table_is_followed_whatever_is_restarted(project: Project) -> None:
    build(project)
    start(project)
    follow_a_table(project)
    show_memory(project)
    for service in (*RESTARTED, *NODES):
        say(f"{service} restarted, healthy after {project.restart(service):.0f} s")
    write(project, ROWS + MORE, MORE)
    caught_up(project)
    show_memory(project)
    assert project.down() == []


@pytest.mark.parametrize("project", [("kafka", "gcs")], indirect=True)
def test_messages_reach_kafka_and_the_lake_is_a_bucket(project: Project) -> None:
    conf = project.folder / "docker" / "ringsync.yaml"
    conf.write_text(with_alternatives(conf.read_text()))
    build(project)
    start(project)
    create_bucket()
    follow_a_table(project)
    show_memory(project)
    assert {f"ringsync.{TABLE}-key", f"ringsync.{TABLE}-value"} <= registered()
    assert messages(f"ringsync.{TABLE}") >= ROWS + MORE
    for service in ("gcs", "kafka", "schema-registry"):
        say(f"{service} restarted, healthy after {project.restart(service):.0f} s")
    write(project, ROWS + MORE, MORE)
    caught_up(project)
    assert project.down() == []


def create_bucket() -> None:
    """As docs/airflow.md says it."""
    request = urllib.request.Request(
        "http://127.0.0.1:4443/storage/v1/b?project=ringsync",
        json.dumps({"name": "ringsync"}).encode(),
        {"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=10).close()


def registered() -> set[str]:
    """The subjects of the schema registry."""
    with urllib.request.urlopen("http://127.0.0.1:8082/apis/ccompat/v7/subjects", timeout=30) as answer:
        return set(json.load(answer))


def messages(topic: str) -> int:
    """How many messages a topic has, as a consumer on this machine sees them."""
    consumer = Consumer({"bootstrap.servers": "127.0.0.1:9092", "group.id": "test", "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    try:
        return sum(len(some) for some in iter(lambda: consumer.consume(10_000, timeout=15), []))
    finally:
        consumer.close()
