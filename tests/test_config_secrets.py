"""No secret that somebody has written into ringsync.yaml is repeated, wherever it is."""

import os
import pickle
import re
from pathlib import Path

import pytest

from ringsync.config import ConfigError, load_config
from ringsync.installed import installed
from ringsync.steps.application import remedy_inside
from tests.test_config import CLIENT, MINIMAL, OAUTH, with_login, written


def test_a_plain_password_is_refused_and_not_repeated(tmp_path: Path) -> None:
    document = {**MINIMAL, "airflow": {"password": "hunter2"}}
    with pytest.raises(ConfigError, match=r"airflow\.password: do not write the secret itself here") as caught:
        load_config(written(tmp_path, document))
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "kafka",
    [
        with_login(username="u", password="hunter2"),
        with_login(token="hunter2"),
        with_login(oauth={**CLIENT, "client_secret": "hunter2"}),
        with_login(oauth={**CLIENT, "token_url": "https://me:hunter2@t/token"}),
        {**OAUTH, "oauth": {**CLIENT, "client_secret": "hunter2"}},
        {**OAUTH, "oauth": "ringsync:hunter2"},
        {**with_login(), "schema_registry_login": "ringsync:hunter2"},
        with_login(oauth="hunter2"),
    ],
)
def test_no_secret_of_kafka_is_repeated(tmp_path: Path, kafka: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, {**MINIMAL, "kafka": kafka}))
    assert "hunter2" not in str(caught.value)


PASSWORDS = (
    ["-pw", "hunter2"],
    ["--password", "hunter2"],
    ["--password=hunter2"],
    ["sh", "-c", "nodetool -pw hunter2"],
)


@pytest.mark.parametrize(
    "change",
    [
        {"airflow": {"url": "http://admin:hunter2@127.0.0.1:8080"}},
        {"airflow": "http://admin:hunter2@127.0.0.1:8080"},
        {"store": {"url": "gs://me:hunter2@bucket/x"}},
        {"store": {"url": "lake", "gcs_endpoint": "http://me:hunter2@127.0.0.1:4443"}},
        {"kafka": {"bootstrap_servers": ["me:hunter2@b:9092"]}},
        {"kafka": {"bootstrap_servers": "SASL_SSL://me:hunter2@b:9092"}},
        {"kafka": {"bootstrap_servers": ["b:1"], "tls": {"certificate_file": "c", "key_password": "hunter2"}}},
        {"cassandra": {"contact_points": ["cassandra:hunter2@10.0.0.1"]}},
        {"airflow": {"password": {"env": "hunter2!"}}},
        {"alarms": {"notifiers": {"token": "hunter2"}}},
        {"alarms": {"notifiers": [{"name": "a.B", "arguments": "hunter2"}]}},
        {"kafka": {"bootstrap_servers": ["b:1"], "password": {"hunter2": None}}},
        {"airflow": {"password": {"hunter2": {"hunter2": 1}}}},
        {"metrics": {"password": "hunter2"}},
        *({"sstable": {"nodetool": ["nodetool", "-u", "a", *words]}} for words in PASSWORDS),
        {"sstable": {"nodes": {"10.0.0.1": {"nodetool": ["nodetool", "-pw", "hunter2"]}}}},
    ],
)
def test_no_secret_in_an_address_is_accepted_or_repeated(tmp_path: Path, change: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, {**MINIMAL, **change}))
    assert "hunter2" not in str(caught.value)


def test_a_password_of_nodetool_belongs_into_its_file(tmp_path: Path) -> None:
    nodetool = ["nodetool", "-u", "a", "-pwf", "/f", "--password-file", "/f"]
    load_config(written(tmp_path, {**MINIMAL, "sstable": {"nodetool": nodetool}}))
    with pytest.raises(ConfigError, match=r"sstable\.nodetool: .*-pwf FILE"):
        load_config(written(tmp_path, {**MINIMAL, "sstable": {"nodetool": ["nodetool", *PASSWORDS[0]]}}))


@pytest.mark.parametrize(
    "secret",
    [
        "hunter2: x",
        "*hunter2",
        "!hunter2 x",
        "&hunter2",
        "%hunter2",
        "`hunter2",
        '"hunter2',
        "{hunter2: 1,\n hunter2: 2}",
    ],
)
def test_a_line_that_is_no_yaml_is_not_repeated(tmp_path: Path, secret: str) -> None:
    with pytest.raises(ConfigError, match=r"lines? [23]|do not write the secret itself") as caught:
        load_config(written(tmp_path, f"airflow:\n  password: {secret}\n"))
    assert "hunter2" not in str(caught.value)


def test_executors_get_the_secrets_that_only_the_driver_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task's code takes them along: not its arguments, its environment, or anything that is shown."""
    (tmp_path / "token").write_text("hunter-file\n")
    monkeypatch.setenv("RINGSYNC_PASSWORD_PROD", "hunter-airflow")
    monkeypatch.setenv("BROKER", "hunter-environment")
    (tmp_path / "key").write_text("hunter-file\n")
    tls = {"certificate_file": "c.pem", "key_password": {"file": "key"}}
    source = {**MINIMAL["cassandra"], "username": "u", "password": {"airflow_connection": "prod"}, "tls": tls}
    kafka = {**with_login(token={"file": "token"}), "sasl_mechanism": "PLAIN", "tls": {}}
    kafka |= {"username": "u", "password": {"env": "BROKER"}}
    config = load_config(written(tmp_path, {**MINIMAL, "cassandra": source, "kafka": kafka}))
    sent = pickle.dumps(config)
    for name in ("RINGSYNC_PASSWORD_PROD", "BROKER"):
        monkeypatch.delenv(name)
    for name in ("token", "key"):
        os.remove(tmp_path / name)
    for received in (pickle.loads(sent), pickle.loads(pickle.dumps(pickle.loads(sent)))):
        secrets = received.cassandra.secrets("cassandra")
        assert {secret.resolve(key) for key, secret in secrets.items()} == {"hunter-airflow", "hunter-file"}
        for key, secret in received.kafka.secrets("kafka").items():  # executors do not need them
            with pytest.raises(ConfigError, match=re.escape(key)):
                secret.resolve(key)
        for shown in (repr(received), str(received), received.model_dump_json()):
            assert "hunter" not in shown
    assert b"hunter-environment" not in sent
    with pytest.raises(ConfigError, match="RINGSYNC_PASSWORD_PROD is not set"):
        config.cassandra.secrets("cassandra")["cassandra.password"].resolve("cassandra.password")  # each time anew


def test_a_secret_that_nobody_has_does_not_keep_the_others_from_their_work(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, {**MINIMAL, "airflow": {"password": {"env": "NOT_HERE"}}}))
    received = pickle.loads(pickle.dumps(config))
    with pytest.raises(ConfigError, match="environment variable NOT_HERE is not set"):
        received.airflow.password.resolve("airflow.password")


def test_an_executor_with_another_version_refuses_to_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = pickle.dumps(load_config(written(tmp_path, MINIMAL)))
    ours = installed()
    monkeypatch.setattr("ringsync.config.installed", lambda: {**ours, "numpy": "1.0", "java": "11"})
    with pytest.raises(ConfigError, match=rf"numpy 1\.0, not {re.escape(ours['numpy'])}.*install the same") as caught:
        pickle.loads(sent)
    assert remedy_inside(Exception(f"x\nringsync.config.section.ConfigError: {caught.value}\n\n\tat x.y")) == str(
        caught.value
    )
    monkeypatch.setattr("ringsync.config.installed", lambda: {"ringsync": ours["ringsync"], "new": "1"})
    assert pickle.loads(sent).server_name, "what one side does not say is not compared"
