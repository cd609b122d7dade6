"""What can be known of docker-compose.yaml without a container engine."""

import json
import os
import re
import stat
import subprocess
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from ringsync.config import load_config
from tests.compose import engine
from tests.compose.images import STAND_INS, TARGETS, external_images
from tests.compose.project import with_alternatives

ROOT = Path(__file__).parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
RUNS_ONCE = {"airflow-init"}
CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}
KNOWN_KEYS = {
    *("image", "build", "restart", "environment", "volumes", "depends_on", "healthcheck"),
    *("command", "entrypoint", "hostname", "ports", "profiles", "stop_grace_period"),
}


@pytest.fixture(params=sorted(SERVICES))
def service(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return request.param, SERVICES[request.param]


def test_all_parts_are_there() -> None:
    cassandra = {"cassandra-1", "cassandra-2", "cassandra-3"}
    airflow = {"airflow-init", "airflow-api", "airflow-scheduler", "airflow-dag-processor", "postgres"}
    assert set(SERVICES) == cassandra | airflow | {"spark-master", "spark-worker", "gcs", "kafka", "schema-registry"}


def test_keys_are_composes(service: tuple[str, dict[str, Any]]) -> None:
    assert set(service[1]) <= KNOWN_KEYS
    assert set(service[1].get("healthcheck", {})) <= {"test", "interval", "timeout", "retries", "start_period"}


def test_images_are_pinned(service: tuple[str, dict[str, Any]]) -> None:
    assert re.fullmatch(r"[a-z0-9/_-]+:v?\d+\.\d+[\w.-]*", service[1]["image"])


def test_an_image_is_built_once() -> None:
    """podman-compose builds it for each service that says how, six times side by side."""
    built = [one["image"] for one in SERVICES.values() if "build" in one]
    assert len(built) == len(set(built))


def test_base_images_are_pinned() -> None:
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert bases
    assert all(re.fullmatch(r"[a-z0-9/_-]+:\d+\.\d+\.\d+[\w.-]*", base) for base in bases)


def test_ports_are_bound_to_this_machine_only_and_once() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in ports)
    published = [port.split(":")[1] for port in ports]
    assert len(set(published)) == len(published)


def test_services_tell_whether_they_are_healthy(service: tuple[str, dict[str, Any]]) -> None:
    name, definition = service
    assert ("healthcheck" in definition) is (name not in RUNS_ONCE)


def test_what_is_depended_on_is_there_and_can_fulfil_the_condition(service: tuple[str, dict[str, Any]]) -> None:
    name, definition = service
    for target, wanted in definition.get("depends_on", {}).items():
        assert wanted["condition"] in CONDITIONS
        assert set(SERVICES[target].get("profiles", [])) <= set(definition.get("profiles", [])), f"{name} → {target}"
        if wanted["condition"] == "service_healthy":
            assert "healthcheck" in SERVICES[target]
        if wanted["condition"] == "service_completed_successfully":
            assert target in RUNS_ONCE


def test_dependencies_have_no_circle() -> None:
    done: set[str] = set()
    while len(done) < len(SERVICES):
        ready = {name for name, one in SERVICES.items() if set(one.get("depends_on", {})) <= done} - done
        assert ready
        done |= ready


def test_mounted_files_exist_and_volumes_are_declared(service: tuple[str, dict[str, Any]]) -> None:
    for volume in service[1].get("volumes", []):
        source = volume.split(":")[0]
        if source.startswith("./"):
            assert (ROOT / source).is_file()
        else:
            assert source in COMPOSE["volumes"]


def test_no_volume_is_unused() -> None:
    used = {volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])}
    assert set(COMPOSE["volumes"]) <= used


def test_what_the_dockerfile_copies_exists_and_reaches_the_builder() -> None:
    allowed = re.findall(r"^!(\S+)", (ROOT / "docker" / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert any(source == name or source.startswith(name + "/") for name in allowed), source


def test_commands_of_ours_are_in_the_image() -> None:
    commands = {word for one in SERVICES.values() for word in one.get("command", []) if word.startswith("docker/")}
    checks = {word for one in SERVICES.values() for word in one.get("healthcheck", {}).get("test", [])}
    for file in commands | {word for word in checks if word.startswith("docker/")}:
        assert (ROOT / file).is_file()
        assert file in DOCKERFILE


@pytest.mark.parametrize("script", sorted((ROOT / "docker").glob("*.sh")), ids=lambda path: path.name)
def test_scripts_can_be_executed(script: Path) -> None:
    assert script.stat().st_mode & stat.S_IXUSR


def test_secrets_come_from_the_environment_and_the_example_holds_none() -> None:
    used = set(re.findall(r"\$\{(\w+)", (ROOT / "docker-compose.yaml").read_text()))
    example = dict(re.findall(r"^(\w+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert used == set(example)
    assert not any(example.values())
    for line in (ROOT / "docker-compose.yaml").read_text().splitlines():
        if re.search(r"(PASSWORD|SECRET|FERNET)\w*:", line) and "_FILE" not in line:
            assert "${" in line


def test_the_pool_that_the_dags_use_is_created() -> None:
    pools = json.loads((ROOT / "docker" / "pools.json").read_text())
    assert SERVICES["airflow-scheduler"]["environment"]["RINGSYNC_SPARK_POOL"] in pools


def test_its_configuration_is_valid_and_names_its_services() -> None:
    config = load_config(ROOT / "docker" / "ringsync.yaml")
    assert set(config.cassandra.contact_points) <= set(SERVICES)
    assert config.airflow.url == "http://airflow-api:8080"
    volumes = {volume.split(":")[1] for volume in SERVICES["spark-worker"]["volumes"]}
    assert config.store.url.removeprefix("file://") in volumes


def test_what_its_configuration_has_as_comments_is_valid_and_names_services(tmp_path: Path) -> None:
    text = with_alternatives((ROOT / "docker" / "ringsync.yaml").read_text())
    (tmp_path / "ringsync.yaml").write_text(text)
    config = load_config(tmp_path / "ringsync.yaml")
    assert config.store.url == "gs://ringsync/lake"
    assert config.kafka is not None
    addresses = [config.store.gcs_endpoint, config.kafka.schema_registry_url, *config.kafka.bootstrap_servers]
    for address in addresses:
        name = re.fullmatch(r"(?:http://)?([\w-]+):\d+(?:/.*)?", str(address))
        assert name, address
        assert SERVICES[name[1]]["profiles"]


def test_the_emulator_knows_the_address_by_which_it_is_asked(tmp_path: Path) -> None:
    (tmp_path / "ringsync.yaml").write_text(with_alternatives((ROOT / "docker" / "ringsync.yaml").read_text()))
    endpoint = load_config(tmp_path / "ringsync.yaml").store.gcs_endpoint
    options = SERVICES["gcs"]["command"]
    assert options[options.index("-external-url") + 1] == endpoint
    assert f"http://{options[options.index('-public-host') + 1]}" == endpoint


def test_the_lake_is_for_its_user_only() -> None:
    """An empty named volume takes over the rights of the image's folder; cdcservice start warns of others."""
    assert re.search(r"install -d .*-m 750 /lake", DOCKERFILE)


def test_each_image_that_is_not_built_has_a_stand_in() -> None:
    assert {name.split(":")[0] for name in external_images(ROOT)} == {*TARGETS}
    stages = re.findall(r" AS (\w+)$", (STAND_INS / "Dockerfile").read_text(), re.MULTILINE)
    assert {*TARGETS.values()} <= {*stages}


def test_without_root_or_engine_make_test_compose_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "root" in str(engine.why_not())
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert f"apt-get install --no-install-recommends {engine.PACKAGES}" in str(engine.why_not())


def settings_of_node(name: str, folder: Path) -> dict[str, Any]:
    """What docker/cassandra.sh makes of a configuration like the image's; started again it makes the same of it."""
    own = folder / name
    (own / "bin").mkdir(parents=True)
    for program in ("install", "docker-entrypoint.sh"):
        stub = own / "bin" / program
        stub.write_text(f'#!/bin/sh\necho {program} "$@"\n')
        stub.chmod(0o755)
    conf = own / "cassandra.yaml"
    conf.write_text("cluster_name: x\n# cdc_block_writes: true\ncdc_enabled: false\n#cdc_raw_directory: /var/lib\n")
    service = SERVICES[name]
    path = f"{own / 'bin'}:{os.environ['PATH']}"
    environment = {**service["environment"], "PATH": path, "CASSANDRA_CONF": str(own), "HOSTNAME": service["hostname"]}
    found = []
    for _ in range(2):
        done = subprocess.run(
            [ROOT / "docker" / "cassandra.sh", *service["command"]], env=environment, capture_output=True, check=True
        )
        found.append(yaml.safe_load(conf.read_text()))
    settings: dict[str, Any] = found[0]
    logs = f"/logs/{service['hostname']}"
    assert done.stdout.decode().splitlines() == [
        f"install -d -o cassandra {logs} {logs}/commitlog",
        f"install -d -o cassandra -g {environment['RINGSYNC_GROUP']} -m 2775 {settings['cdc_raw_directory']}",
        "docker-entrypoint.sh cassandra -f",
    ]
    assert settings == found[1]
    assert (settings["cluster_name"], settings["cdc_enabled"], settings["cdc_block_writes"]) == ("x", True, False)
    assert settings["commitlog_directory"] == f"{logs}/commitlog"
    return settings


def test_the_commit_logs_are_mounted_where_the_nodes_say_they_are(tmp_path: Path) -> None:
    scheduler = SERVICES["airflow-scheduler"]["volumes"]
    for name in ("cassandra-1", "cassandra-2", "cassandra-3"):
        folder = PurePosixPath(settings_of_node(name, tmp_path)["cdc_raw_directory"]).parent
        (volume,) = [one for one in SERVICES[name]["volumes"] if one.endswith(f":{folder}")]
        assert volume in scheduler
    user = re.search(r"groupadd --gid (\d+) ringsync", DOCKERFILE)
    assert user
    assert SERVICES["cassandra-1"]["environment"]["RINGSYNC_GROUP"] == user[1]
    # What all other services of Airflow have, which a list of one's own replaces.
    assert set(SERVICES["airflow-api"]["volumes"]) <= set(scheduler)


def test_the_loop_that_always_runs_leaves_cores_for_all_slots() -> None:
    """An application takes as many cores as the master gives to each, and an executor of a gigabyte."""
    (pool,) = json.loads((ROOT / "docker" / "pools.json").read_text()).values()
    options = SERVICES["spark-master"]["environment"]["SPARK_MASTER_OPTS"]
    cores = re.fullmatch(r"-Dspark\.deploy\.defaultCores=(\d+)", options)
    assert cores
    worker = SERVICES["spark-worker"]["environment"]
    assert int(worker["SPARK_WORKER_CORES"]) >= int(cores[1]) * (pool["slots"] + 1)
    assert int(worker["SPARK_WORKER_MEMORY"].removesuffix("g")) >= pool["slots"] + 1
