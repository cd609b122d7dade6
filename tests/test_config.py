"""ringsync.yaml: every mistake is named with its key and a remedy."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from croniter import croniter

from ringsync.config import Config, ConfigError, load_config
from ringsync.config.section import Section
from ringsync.wiring import kafka_settings

MINIMAL = {"server_name": "demo", "cassandra": {"contact_points": ["127.0.0.1"]}, "store": {"url": "lake"}}
CLIENT = {"token_url": "https://t/token", "client_id": "c", "client_secret": {"env": "CLIENT"}}
OAUTH = {"bootstrap_servers": ["b:1"], "sasl_mechanism": "OAUTHBEARER", "oauth": CLIENT}
LOGIN = {"username": "u", "password": {"env": "REGISTRY"}}
EXAMPLE = Path(__file__).parent.parent / "config" / "ringsync.yaml"


def written(folder: Path, document: object) -> Path:
    path = folder / "ringsync.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return path


def test_the_example_is_valid_and_shows_the_defaults(tmp_path: Path) -> None:
    example, minimal = load_config(EXAMPLE), load_config(written(tmp_path, MINIMAL))
    for name in type(example).model_fields.keys() - {"server_name", "store"}:
        assert getattr(example, name) == getattr(minimal, name), name


def keys_of(kind: Any) -> set[str]:
    """Names of all keys of a section, and of those inside."""
    if isinstance(kind, type) and issubclass(kind, Section):
        return kind.model_fields.keys() | set().union(
            *(keys_of(field.annotation) for field in kind.model_fields.values())
        )
    return set().union(*(keys_of(part) for part in get_args(kind)))


def test_the_example_has_every_key() -> None:
    """Also what is not set there, as a comment."""
    secrets = {"env", "file", "airflow_connection"}
    shown = set(re.findall(r"(?m)^[ #-]*([a-z_0-9]+):", EXAMPLE.read_text()))
    assert len(keys_of(Config)) > 60
    assert keys_of(Config) - secrets - shown == set()


def test_the_example_comments_every_key() -> None:
    """On the line before, or on that before its neighbours."""
    commented = False
    for line in EXAMPLE.read_text().splitlines():
        if line.lstrip().startswith("#") or not line.strip():
            commented = bool(line.strip())
        elif not line.endswith(":"):
            assert commented or "#" in line, line


def test_relative_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    document = {**MINIMAL, "airflow": {"password": {"file": "secret"}}}
    config = load_config(written(tmp_path, document))
    assert config.store.url == str(tmp_path / "lake")
    (tmp_path / "secret").write_text("hush\n")
    assert config.airflow.password.resolve("airflow.password") == "hush"


def test_paths_of_the_sync_are_relative_to_the_file_too(tmp_path: Path) -> None:
    broker = {"bootstrap_servers": ["[::1]:9092"], "serialisation": "json", "tls": {"ca_file": "ca.pem"}}
    document = {**MINIMAL, "sync": {"keystore": "keys"}, "metrics": {"prometheus_file": "/m.prom"}, "kafka": broker}
    config = load_config(written(tmp_path, document))
    assert config.sync.keystore == str(tmp_path / "keys")
    assert config.sync.cdc_raw is None
    assert config.metrics.prometheus_file == "/m.prom"
    assert config.kafka
    assert config.kafka.tls
    assert config.kafka.tls.ca_file == str(tmp_path / "ca.pem")


def test_connections_of_all_passwords_are_handed_on(tmp_path: Path) -> None:
    def login(connection: str) -> dict[str, object]:
        return {"username": "u", "password": {"airflow_connection": connection}}

    cassandra = {"contact_points": ["a"], **login("cluster")}
    kafka = {"bootstrap_servers": ["b:1"], "serialisation": "json", "sasl_mechanism": "PLAIN", **login("broker")}
    config = load_config(written(tmp_path, {**MINIMAL, "cassandra": cassandra, "kafka": kafka}))
    assert config.airflow_connections("cassandra", "kafka") == ("cluster", "broker")
    assert config.airflow_connections("cassandra", "airflow") == ("cluster",)
    client = {"token_url": "https://t/token", "client_id": "c", "client_secret": {"airflow_connection": "client"}}
    for registry, connection in (
        (login("registry"), "registry"),
        ({"token": {"airflow_connection": "token"}}, "token"),
        ({"oauth": client}, "client"),
    ):
        kafka = {**OAUTH, "oauth": client, "schema_registry_url": "https://r", "schema_registry_login": registry}
        config = load_config(written(tmp_path, {**MINIMAL, "kafka": kafka}))
        assert sorted(config.airflow_connections("cassandra", "kafka")) == sorted(("client", connection))


def test_deletions_are_expanded_where_it_is_said(tmp_path: Path) -> None:
    assert not load_config(written(tmp_path, MINIMAL)).sync.expand_deletions_of("shop.orders")
    tables = {"shop.orders": {"expand_deletions": False}, "shop.items": {"after_image": "replica"}}
    config = load_config(written(tmp_path, {**MINIMAL, "sync": {"expand_deletions": True, "tables": tables}}))
    assert [config.sync.expand_deletions_of(f"shop.{name}") for name in ("orders", "items", "others")] == [
        False,
        True,
        True,
    ]


def test_kafka_s_partition_is_chosen_by_the_partition_key_unless_told_otherwise(tmp_path: Path) -> None:
    for told in ("partition_key", "primary_key", None):
        kafka = {"bootstrap_servers": ["b:1"], **({"partition_by": told} if told else {})}
        found = kafka_settings(load_config(written(tmp_path, {**MINIMAL, "kafka": kafka})))
        assert found
        assert found.partition_by == (told or "partition_key")


def test_the_brokers_password_is_resolved_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    login = {"sasl_mechanism": "PLAIN", "username": "u", "password": {"env": "BROKER"}}
    kafka = {"bootstrap_servers": ["b:1"], "replication_factor": 3, "tls": {"ca_file": "/ca"}, **login}
    config = load_config(written(tmp_path, {**MINIMAL, "kafka": kafka}))
    with pytest.raises(ConfigError, match=r"kafka\.password: environment variable BROKER is not set"):
        kafka_settings(config)
    monkeypatch.setenv("BROKER", "hush")
    found = kafka_settings(config)
    assert found
    assert (found.password, found.partitions, found.replication_factor) == ("hush", 4, 3)
    assert "hush" not in repr(found)
    assert kafka_settings(load_config(written(tmp_path, MINIMAL))) is None


@pytest.mark.parametrize(
    ("login", "key"),
    [(LOGIN, "password"), ({"token": {"env": "REGISTRY"}}, "token"), ({"oauth": CLIENT}, "oauth.client_secret")],
)
def test_the_registry_s_secret_must_be_there_and_is_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, login: dict[str, object], key: str
) -> None:
    kafka = {"bootstrap_servers": ["b:1"], "schema_registry_url": "https://r", "schema_registry_login": login}
    config = load_config(written(tmp_path, {**MINIMAL, "kafka": kafka}))
    with pytest.raises(
        ConfigError, match=rf"^kafka\.schema_registry_login\.{key}: environment variable \w+ is not set"
    ):
        kafka_settings(config)
    for name in ("REGISTRY", "CLIENT"):
        monkeypatch.setenv(name, "hush")
    found = kafka_settings(config)
    assert found
    assert "hush" not in repr(found)


def test_the_secret_of_the_brokers_client_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(written(tmp_path, {**MINIMAL, "kafka": OAUTH}))
    with pytest.raises(ConfigError, match=r"^kafka\.oauth\.client_secret: environment variable CLIENT is not set"):
        kafka_settings(config)
    monkeypatch.setenv("CLIENT", "hush")
    assert kafka_settings(config)


def with_login(**login: object) -> dict[str, object]:
    """The section ``kafka`` with a login to a registry."""
    return {"bootstrap_servers": ["b:1"], "schema_registry_url": "https://r", "schema_registry_login": login}


def test_tables_and_nodes_of_their_own(tmp_path: Path) -> None:
    tables = {"Shop.Orders": {"after_image": "none"}, '"S"."b"': {"bucket_by": "arrival"}}
    nodes = {"10.0.0.1": "rack-b", "4e5d": "rack-a", "10.0.0.2": "default"}
    sync = load_config(written(tmp_path, {**MINIMAL, "sync": {"tables": tables, "queue_of_node": nodes}})).sync
    assert [sync.after_image_of(table) for table in ("shop.orders", '"S".b', "a.b")] == ["none", "source", "source"]
    assert [sync.bucket_by_of(table) for table in ("shop.orders", '"S".b', "s.b")] == [
        *("write_time", "arrival", "write_time"),
    ]
    assert [sync.queue_of(*node) for node in (("10.0.0.1", "4e5d"), ("10.0.0.1", "x"), ("10.0.0.9", "x"))] == [
        *("rack-a", "rack-b", "default"),
    ]
    assert sync.queues == ("default", "rack-a", "rack-b")


def test_when_replicas_are_verified(tmp_path: Path) -> None:
    """YAML reads the word off as a truth value."""

    def schedule(text: str) -> str | None:
        document = yaml.safe_dump(MINIMAL) + f"replica:\n  verify_schedule: {text}\n"
        return load_config(written(tmp_path, document)).replica.verify_schedule

    assert [schedule(text) for text in ("off", "null", "'off'", "'@weekly'", "30 2 * * MON-FRI")] == [
        *(None, None, None, "@weekly", "30 2 * * MON-FRI"),
    ]
    for right in ("'*/15 * * * *'", "0 2,14 1-7 JAN,jul sun", "00 02 29 2 *", "59 23 31 12 7"):
        assert schedule(right) == right.strip("'")
        assert croniter.is_valid(right.strip("'"))
    outside = ("0 25 * * *", "'99 99 * * *'", "foo bar * * *", "'? ? ? ? ?'", "0 0 0 * *", "0 0 * 13 *", "0 0 * * 8")
    for wrong in ("daily", "5", "'30 2'", "true", *outside, "5/0 * * * *"):
        with pytest.raises(ConfigError, match=r"replica\.verify_schedule"):
            schedule(wrong)


def test_which_tables_are_followed(tmp_path: Path) -> None:
    def followed(**sync: object) -> list[str]:
        config = load_config(written(tmp_path, {**MINIMAL, "sync": sync}))
        names = ("shop.orders", "shop.tmp_1", "shop.tmp", '"Shop".orders', 'shop."Tmp_1"', "log.tmp_1")
        return [name for name in names if config.sync.follows(name)]

    assert len(followed()) == 6
    assert followed(include=["shop.*"]) == ["shop.orders", "shop.tmp_1", "shop.tmp", 'shop."Tmp_1"']
    assert followed(include=["shop.*"], exclude=["*.tmp_*"]) == ["shop.orders", "shop.tmp", 'shop."Tmp_1"']
    assert followed(include=['"Shop".*', 'shop."Tmp"*']) == ['"Shop".orders', 'shop."Tmp_1"']
    assert followed(include=["SHOP.Orders", "log.tmp_1"], exclude=["log.*"]) == ["shop.orders"]


def test_settings_of_tables_that_match_a_pattern(tmp_path: Path) -> None:
    """The table's own name wins over patterns, and of those the first that matches."""
    tables = {"shop.im*": {"bucket_by": "arrival"}, "shop.*": {"after_image": "none"}, "shop.imported": {}}
    sync = load_config(written(tmp_path, yaml.safe_dump({**MINIMAL, "sync": {"tables": tables}}, sort_keys=False))).sync
    names = ("shop.images", "shop.orders", "shop.imported", "log.images")
    assert [sync.bucket_by_of(name) for name in names] == ["arrival", "write_time", "write_time", "write_time"]
    assert [sync.after_image_of(name) for name in names] == ["source", "none", "source", "source"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cassandra": {"contact_points": ["a"], "prot": 1}}, r"cassandra\.prot: unknown key; did you mean port\?"),
        ({"zzz": 1}, "zzz: unknown key; known keys here: server_name"),
        ({"cassandra": {}}, r"cassandra\.contact_points: this key is required"),
        ({"cassandra": {"contact_points": []}}, r"cassandra\.contact_points"),
        (
            {"cassandra": {"contact_points": ["a"], "port": "9042"}},
            r"cassandra\.port: must be an integer, .* found '9042'",
        ),
        ({"cassandra": {"contact_points": ["a"], "port": 0}}, r"cassandra\.port: .*greater than or equal to 1"),
        ({"cassandra": {"contact_points": ["a"], "consistency_level": "QUORUMM"}}, r"consistency_level: .*'QUORUM'"),
        ({"cassandra": {"contact_points": ["a"], "username": "u"}}, "username and password go together"),
        ({"server_name": "my server"}, "server_name: must be letters, digits and underscores"),
        ({"airflow": {"password": {"env": "A", "file": "b"}}}, r"airflow\.password: a secret is a reference"),
        ({"stream": {"mapping": "lossy"}}, r"stream\.mapping"),
        ({"commitlog_processor_window_count": 0}, r"window_count: .*greater than or equal to 1, found 0"),
        ({"commitlog_processor_window_count": 101}, r"window_count: .*less than or equal to 100"),
        ({"commitlog_processor_window_interval_ms": 999}, r"window_interval_ms: .*greater than or equal to 1000"),
        ({"sync": {"digest_retention_h": 0}}, r"sync\.digest_retention_h: .*greater than 0"),
        ({"sync": {"digest_retention_h": 0.01}}, r"sync\.digest_retention_h: must be longer than .* 0\.0833333 h"),
        ({"sync": {"after_image": "cluster"}}, r"sync\.after_image: .*'source', 'replica' or 'none'"),
        ({"sync": {"tables": {"orders": {}}}}, r"sync\.tables\.orders: 'orders' is not a table name or pattern"),
        ({"sync": {"include": []}}, r"sync\.include: .*at least 1 item"),
        ({"sync": {"exclude": ["shop"]}}, r"sync\.exclude\.0: 'shop' is not a .* write shop\.orders or shop"),
        ({"sync": {"include": ["a.b", "a.b-c"]}}, r"sync\.include\.1: 'a\.b-c' is not a table name or pattern"),
        ({"sync": {"tables": {"a.b": {"bucket": "x"}}}}, r"tables\.a\.b\.bucket: unknown key; did you mean bucket_by"),
        (
            {"sync": {"queue_of_node": {"10.0.0.1": "a b"}}},
            r"queue_of_node\.10\.0\.0\.1: must be the name of an Airflow",
        ),
        ({"kafka": {"bootstrap_servers": ["b"], "serialisation": "json"}}, r"bootstrap_servers\.0: must be host:port"),
        (
            {"kafka": {"bootstrap_servers": ["b:1"], "serialisation": "json", "schema_registry_url": "http://r"}},
            r"kafka: schema_registry_url is for serialisation avro",
        ),
        (
            {"kafka": {"bootstrap_servers": ["b:1"], "partition_by": "key"}},
            r"kafka\.partition_by: .*'partition_key' or 'primary_key'",
        ),
        ({"kafka": {"bootstrap_servers": ["b:1"], "json_schemas": False}}, r"kafka: json_schemas is for .* json"),
        (
            {"kafka": {"bootstrap_servers": ["b:1"], "schema_registry_url": "registry:8081"}},
            r"kafka\.schema_registry_url: must be like http://host:port .* found 'registry:8081'$",
        ),
        (
            {"kafka": {"bootstrap_servers": ["b:1"], "schema_registry_url": "http://me:secret@registry:8081"}},
            r"kafka\.schema_registry_url: .* hold no user or password$",
        ),
        (
            {"kafka": {"bootstrap_servers": ["b:1"], "serialisation": "json", "username": "u"}},
            "kafka: sasl_mechanism, username and password go together",
        ),
        ({"kafka": {**OAUTH, "oauth": None}}, r"kafka: sasl_mechanism OAUTHBEARER and oauth go together"),
        ({"kafka": {**OAUTH, "sasl_mechanism": "PLAIN"}}, r"kafka: sasl_mechanism OAUTHBEARER and oauth go together"),
        ({"kafka": {**OAUTH, **LOGIN}}, r"kafka: username and password are for other mechanisms than OAUTHBEARER"),
        ({"kafka": {**OAUTH, "oauth": {**CLIENT, "token_url": "t"}}}, r"kafka\.oauth\.token_url: must be like http"),
        (
            {"kafka": {**OAUTH, "oauth": {**CLIENT, "secret": "x"}}},
            r"oauth\.secret: unknown key; did you mean client_s",
        ),
        (
            {"kafka": {**OAUTH, "oauth": {**CLIENT, "extensions": {"a": "b,c=d"}}}},
            r"kafka\.oauth\.extensions\.a: must be a text without commas",
        ),
        ({"kafka": {**OAUTH, "oauth": {**CLIENT, "extensions": {"a=": "b"}}}}, r"extensions\.a=: must be letters"),
        (
            {"kafka": {"bootstrap_servers": ["b:1"], "schema_registry_login": LOGIN}},
            r"kafka: schema_registry_login is for a registry: set schema_registry_url, too",
        ),
        ({"kafka": with_login()}, r"kafka\.schema_registry_login: set one of .*, token, oauth; set are: none"),
        ({"kafka": with_login(username="u")}, r"kafka\.schema_registry_login: username and password go together"),
        (
            {"kafka": with_login(**LOGIN, oauth=CLIENT)},
            r"kafka\.schema_registry_login: set one of .*; set are: username and password, oauth",
        ),
        ({"kafka": with_login(token={"env": "T"}, oauth=CLIENT)}, r"set are: token, oauth"),
        ({"kafka": with_login(**LOGIN, logical_cluster="l")}, r"logical_cluster and identity_pool_id are for token"),
        (
            {"kafka": with_login(**{**LOGIN, "username": "a:b"})},
            r"schema_registry_login: username must not contain a co",
        ),
        ({"kafka": with_login(user="u")}, r"schema_registry_login\.user: unknown key; did you mean username\?"),
        ({"cassandra": {"contact_points": "10.0.0.1"}}, r"contact_points: must be a list, such as \[a, b\], found"),
        (
            {"cassandra": {"contact_points": ["10.0.0.1:9042"]}},
            r"points\.0: must have no port: .* cassandra\.port",
        ),
        ({"cassandra": {"contact_points": ["[::1]:9042"]}}, r"contact_points\.0: must have no port"),
        ({"cassandra": {"contact_points": [" a"]}}, r"contact_points\.0: must be the name or the address of a host"),
        ({"cassandra": {"contact_points": ["a"], "tls": True}}, r"tls: must be a mapping of keys; known .*: ca_file"),
        ({"cassandra": {"contact_points": ["a"], "tls": {"key_file": "k"}}}, r"tls: .* set certificate_file, too"),
        (
            {"kafka": {"bootstrap_servers": ["b:1"], "tls": {"key_password": {"env": "K"}}}},
            r"kafka\.tls: .* certif",
        ),
        ({"cassandra": {"contact_points": ["a"], "tls": {"ca_file": "~/ca"}}}, r"tls\.ca_file: .* instead of ~"),
        (
            {"sync": {"tables": {"shop.orders": {"bucket_by": "arrival"}, "Shop.orders": {}}}},
            r"sync\.tables: Shop\.orders and shop\.orders are one: put both together$",
        ),
        (
            {"kafka": {"bootstrap_servers": ["b:1"], "topic_name": {"shop.orders": "a", '"shop".orders': "b"}}},
            r'kafka\.topic_name: "shop"\.orders and shop\.orders are one',
        ),
        ({"store": {"url": "gs:/b/x"}}, r"store\.url: object store .*: give gs://bucket/prefix"),
        (
            {"store": {"url": "~/lake"}},
            r"store\.url: .* the whole path instead of ~ and variables, found '~/lake'",
        ),
        ({"store": {"url": "$HOME/lake"}}, r"store\.url: .* write the whole path instead of ~ and variables"),
        ({"store": {"url": ""}}, r"store\.url: must not be empty"),
        ({"sync": {"cdc_raw": "${RAW}/cdc"}}, r"sync\.cdc_raw: .* instead of ~ and variables"),
        ({"sync": {"run_s": float("inf")}}, r"sync\.run_s: must be a finite number"),
        ({"sync": {"run_s": 1e300}}, r"sync\.run_s: must be less than or equal to 31536000"),
        ({"sync": {"queue_of_node": {"10.0.0.1:9042": "q"}}}, r"queue_of_node\.10\.0\.0\.1:9042: must have no port"),
        ({"archive": {"policy": True}}, r"archive\.policy: must be 'pressure', 'always' or 'off', found True"),
        ({"archive": {"retention_days": float("inf")}}, r"archive\.retention_days: must be a finite number"),
        ({"scan": {"min_splits": 9, "max_splits": 5}}, r"scan: min_splits 9 is more than max_splits 5"),
        ({"kafka": {"bootstrap_servers": ["b:99999"]}}, r"bootstrap_servers\.0: must be host:port"),
        ({"kafka": {"bootstrap_servers": "b:1"}}, r"kafka\.bootstrap_servers: must be a list"),
        ({"airflow": {"url": "127.0.0.1:8080"}}, r"airflow\.url: must be like http://host:port"),
        ({"airflow": {"url": "http://a:99999"}}, r"airflow\.url: must be like http://host:port"),
        ({"airflow": {"password": {"env": "$PASSWORD"}}}, r"airflow\.password\.env: must be the name of an env"),
        (
            {"kafka": {"bootstrap_servers": ["b:1"], "topic_name": {"a.b": "a b"}}},
            r"topic_name\.a\.b: must be the name of",
        ),
        ({"kafka": {"bootstrap_servers": ["b:1"], "topic_name": {"a.*": "a"}}}, r"topic_name\.a\.\*: 'a\.\*' is not a"),
        ({"state": {"replication": {"class": "x'} --"}}}, r"state\.replication\.class: must be as in CQL"),
        ({"Sync": {}}, r"Sync: unknown key; did you mean sync\?"),
        ({"metrics": {"file": "x"}}, r"metrics\.file: unknown key; known keys here: prometheus_file"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(written(tmp_path, {**MINIMAL, **change}))


@pytest.mark.parametrize(
    ("section", "key", "item"),
    [("kafka", "bootstrap_servers", "b"), ("sync", "include", "orders"), ("cassandra", "contact_points", 127)],
)
def test_a_wrong_item_of_a_list_is_one_mistake(tmp_path: Path, section: str, key: str, item: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, {**MINIMAL, section: {key: [item]}}))
    assert len(str(caught.value).splitlines()) == 1
    assert f"{section}.{key}.0: " in str(caught.value)


@pytest.mark.parametrize(
    ("text", "key", "word"),
    [
        ("archive: {policy: off}", "archive.policy", "off"),
        ("stream: {codec: null}", "stream.codec", "null"),
        ("scylla: {preimage: false}", "scylla.preimage", "false"),
        ("scylla: {preimage: true}", "scylla.preimage", "true"),
        ("state: {replication: {class: SimpleStrategy, replication_factor: 1}}", "state.replication", None),
    ],
)
def test_words_that_yaml_takes_for_something_else(tmp_path: Path, text: str, key: str, word: str | None) -> None:
    config = load_config(written(tmp_path, f"{yaml.safe_dump(MINIMAL)}\n{text}\n"))
    section, name = key.split(".")
    assert getattr(getattr(config, section), name) == (word or {"class": "SimpleStrategy", "replication_factor": "1"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sync:\n  run_s: 60.0\nsync:\n  run_s: 30.0\n", "a key is written twice, in lines 1 and 3"),
        ("sync:\n  run_s: 60.0\n  run_s: 60.0\n", "a key is written twice, in lines 2 and 3"),
        ("sync:\n  tables:\n    a.b: {}\n    a.b: {}\n", "a key is written twice, in lines 3 and 4"),
        ("sync: {run_s: 60.0, run_s: 30.0}\n", "a key is written twice, in lines 1 and 1"),
    ],
)
def test_a_key_that_is_written_twice_is_named_with_both_lines(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(written(tmp_path, text + yaml.safe_dump(MINIMAL)))


def test_merge_keys_are_no_repetition(tmp_path: Path) -> None:
    text = "sync:\n  tables:\n    a.b: &one {bucket_by: arrival}\n    a.c: {<<: *one, bucket_by: write_time}\n"
    sync = load_config(written(tmp_path, text + yaml.safe_dump(MINIMAL))).sync
    assert [sync.bucket_by_of(name) for name in ("a.b", "a.c")] == ["arrival", "write_time"]


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, {**MINIMAL, "zzz": 1, "stream": {"mapping": "x"}}))
    assert "zzz" in str(caught.value)
    assert "stream.mapping" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "secret"),
    [
        *((b"x4711", "x4711"), (b"x4711\n", "x4711"), (b"x4711\r\n", "x4711"), (b"\xef\xbb\xbfx4711\n", "x4711")),
        *((b"", "is empty"), (b"\n", "is empty"), (b"x4711\nx4711\n", "has several lines")),
    ],
)
def test_a_secret_is_one_line(tmp_path: Path, content: bytes, secret: str) -> None:
    (tmp_path / "secret").write_bytes(content)
    password = load_config(written(tmp_path, {**MINIMAL, "airflow": {"password": {"file": "secret"}}})).airflow.password
    if secret == "x4711":
        assert password.resolve("airflow.password") == secret
        return
    with pytest.raises(ConfigError, match=f"^airflow.password: .*{secret}") as caught:
        password.resolve("airflow.password")
    assert "x4711" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("state: {replication: {0x1: a, '1': b}}", "1 and 1 are one"),
        ("a: [1", "not valid YAML.*line 1"),
        ("- a", "must be a mapping"),
        ("", "must be a mapping"),
        ("a: b: c", "YAML"),
    ],
)
def test_malformed_yaml(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".*", r"(?s:.*)")):
        load_config(written(tmp_path, text))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration: No such file"):
        load_config(tmp_path / "nothing.yaml")


def test_what_is_no_path() -> None:
    with pytest.raises(ConfigError, match="this is no path"):
        load_config("a\0b")


def test_secrets_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGSYNC_AIRFLOW_PASSWORD", raising=False)
    config = load_config(written(tmp_path, MINIMAL))
    with pytest.raises(
        ConfigError, match=r"airflow\.password: environment variable RINGSYNC_AIRFLOW_PASSWORD is not set"
    ):
        config.airflow.password.resolve("airflow.password")
