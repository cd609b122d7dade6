"""Names and logins of the configuration, before anything is started."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.cluster.scylla import CdcOptions
from ringsync.cluster.session import no_datacenter
from ringsync.config import Config
from ringsync.service import checks, table_checks
from ringsync.service.name_checks import check_logins, check_nodes
from ringsync.service.table_checks import CheckError, check_topics

HOSTS = [
    SimpleNamespace(datacenter=dc, endpoint=SimpleNamespace(address=address), host_id=f"id-{address}")
    for dc, address in (("dc1", "10.0.0.1"), ("dc2", "10.0.0.2"))
]
PASSWORD = {"username": "u", "password": {"env": "P"}}
OAUTH = {"client_id": "c", "client_secret": {"env": "S"}}


def configured(cassandra: dict[str, Any] | None = None, **sections: Any) -> Config:
    document = {"server_name": "s", "store": {"url": "/lake"}, **sections}
    return Config.model_validate({**document, "cassandra": {"contact_points": ["10.0.0.1"], **(cassandra or {})}})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("DC1", "the cluster has no datacenter DC1; did you mean dc1? it has dc1, dc2"),
        ("dc_2", "the cluster has no datacenter dc_2; did you mean dc2? it has dc1, dc2"),
        ("europe", "the cluster has no datacenter europe; it has dc1, dc2"),
    ],
)
def test_a_datacenter_that_is_not_there(name: str, message: str) -> None:
    assert no_datacenter(name, ["dc1", "dc2"]) == message
    with pytest.raises(CheckError) as caught:
        check_nodes(HOSTS, configured(sync={"datacenters": ["dc2", name]}))
    assert str(caught.value) == f"sync.datacenters: {message}"
    assert check_nodes(HOSTS, configured(sync={"datacenters": ["dc2"]})) == []


def test_nodes_that_are_not_there() -> None:
    queues = {"10.0.0.1": "a", "id-10.0.0.2": "b", "10.0.0.9": "c"}
    config = configured(sync={"queue_of_node": queues}, sstable={"nodes": {"10.0.0.8": {}}})
    assert check_nodes(HOSTS, config) == [
        "warning: sync.queue_of_node: 10.0.0.9 is neither the address nor the host id of a node",
        "warning: sstable.nodes: 10.0.0.8 is neither the address nor the host id of a node",
    ]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (configured(), []),
        (configured(PASSWORD), ["cassandra.password"]),
        (configured({**PASSWORD, "tls": {}}), []),
        (configured({**PASSWORD, "contact_points": ["127.0.0.1"]}), []),
        (configured(airflow={"url": "http://airflow:8080"}), ["airflow.password"]),
        (configured(airflow={"url": "https://airflow"}), []),
        (
            configured(kafka={"bootstrap_servers": ["k:1"], "sasl_mechanism": "PLAIN", **PASSWORD}),
            ["the login to the brokers (kafka.sasl_mechanism)"],
        ),
        (configured(kafka={"bootstrap_servers": ["k:1"], "sasl_mechanism": "PLAIN", "tls": {}, **PASSWORD}), []),
        (
            configured(
                kafka={
                    **{"bootstrap_servers": ["k:1"], "tls": {}, "sasl_mechanism": "OAUTHBEARER"},
                    "oauth": {**OAUTH, "token_url": "http://t/token"},
                    "schema_registry_url": "http://r:8081",
                    "schema_registry_login": {"oauth": {**OAUTH, "token_url": "https://t/token"}},
                }
            ),
            ["kafka.schema_registry_login", "kafka.oauth.client_secret"],
        ),
    ],
)
def test_secrets_that_would_go_unencrypted(config: Config, told: list[str]) -> None:
    remarks = check_logins(config)
    assert [one.removeprefix("warning: ").partition(" goes over")[0] for one in remarks] == told


BROKERS = {"bootstrap_servers": ["k:1"]}


@pytest.mark.parametrize(
    ("tables", "topic_name", "message"),
    [
        (["shop.orders", "shop.items"], {}, ""),
        (["shop.eu_orders", "shop_eu.orders"], {}, "s.shop.eu_orders and s.shop_eu.orders, which Kafka takes for one"),
        (["crm.v2_user_events", "crm_v2.user_events"], {}, "{crm_v2.user_events: s-crm_v2-user_events}"),
        (["shop.eu_orders", "shop_eu.orders"], {"shop_eu.orders": "s-shop_eu-orders"}, ""),
        (["shop.eu_orders", "shop_eu.orders"], {"SHOP.EU_ORDERS": "other"}, ""),
        (['shop."a-b"', 'shop."a+b"'], {}, ""),
    ],
)
def test_topics_that_kafka_takes_for_one(tables: list[str], topic_name: dict[str, str], message: str) -> None:
    config = configured(kafka={**BROKERS, "topic_name": topic_name})
    assert check_topics(tables, configured()) == []
    if not message:
        assert check_topics(tables, config) == []
        return
    with pytest.raises(CheckError) as caught:
        check_topics(tables, config)
    assert message in str(caught.value)
    assert "kafka.topic_name: {" in str(caught.value)


@pytest.mark.parametrize("of_scylla", [False, True])
def test_start_refuses_topics_that_kafka_takes_for_one(monkeypatch: pytest.MonkeyPatch, of_scylla: bool) -> None:
    """Of two tables that are followed; what else is checked is well."""
    names = [("shop", "eu_orders"), ("shop_eu", "orders"), ("shop", "plain")]
    cdc = [SimpleNamespace(keyspace_name=keyspace, table_name=name, cdc=name != "plain") for keyspace, name in names]
    cluster = SimpleNamespace(metadata=SimpleNamespace(all_hosts=list))
    session = SimpleNamespace(execute=lambda _: cdc, cluster=cluster)
    monkeypatch.setattr(checks, "_asked", lambda _: nullcontext(session))
    monkeypatch.setattr(checks, "is_scylla", lambda _: of_scylla)
    monkeypatch.setattr(checks, "read_tables", lambda _: SimpleNamespace(tables=[]))
    for name in ("read_nodes", "judge_nodes", "check_permitted"):
        monkeypatch.setattr(checks, name, lambda *_: [])
    for module in (checks, table_checks):
        monkeypatch.setattr(module, "check_readable", lambda *_: None)
    monkeypatch.setattr(table_checks, "options_in", lambda row: CdcOptions(enabled=row.cdc))
    monkeypatch.setattr(table_checks, "requests_of_a_round", lambda *_: 0)
    with pytest.raises(CheckError, match="which Kafka takes for one"):
        checks.check_cluster(configured(kafka=BROKERS))
    told = checks.check_cluster(configured(kafka=BROKERS, sync={"exclude": ["shop_eu.*"]}))
    assert "tables that are followed: shop.eu_orders" in told


@pytest.mark.parametrize("topic", ["x", "s", "s.a.d", "s_a_d", "s_a.d", "s.a_d-00c0ffee.e", "s.a.c"])
def test_a_topic_that_another_table_has_or_may_have_is_refused(topic: str) -> None:
    """By the configuration itself: a table may get cdc after the start."""
    with pytest.raises(ValueError, match=rf"kafka\.topic_name\.a\.c: {topic} .*choose another"):
        configured(kafka={**BROKERS, "topic_name": {"a.b": "x", "a.c": topic}})


def test_topics_that_are_no_streams_names_are_allowed() -> None:
    names = {"a.b": "s.a-eu.b", "a.c": "s.a-eu.c", "a.d": "sa.b.c", "a.e": "s_x", "a.f": "a.f"}
    config = configured(kafka={**BROKERS, "topic_name": names})
    assert config.kafka_topics == {f"s.{table}": topic for table, topic in names.items()}
