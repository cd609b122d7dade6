"""Checks of names and logins in the configuration before ``cdcservice start`` starts anything."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any
from urllib.parse import urlsplit

from ringsync.cluster.session import no_datacenter
from ringsync.config import Config
from ringsync.service.table_checks import CheckError

_HERE = ("127.", "localhost", "::1", "[::1]")
"""Beginnings of the addresses of this machine."""


def check_nodes(hosts: Collection[Any], config: Config) -> list[str]:
    """Check that the datacenters and nodes that the configuration names are there, and return remarks.

    :param hosts: the driver's hosts, all nodes of the cluster
    :raises CheckError: there is no such datacenter
    """
    existing = sorted({host.datacenter for host in hosts})
    for name in config.sync.datacenters:
        if name not in existing:
            raise CheckError(f"sync.datacenters: {no_datacenter(name, existing)}")
    nodes = {str(host.endpoint.address) for host in hosts} | {str(host.host_id) for host in hosts}
    named: dict[str, Collection[str]] = {
        "sync.queue_of_node": config.sync.queue_of_node,
        "sstable.nodes": config.sstable.nodes,
    }
    return [
        f"warning: {key}: {node} is neither the address nor the host id of a node"
        for key, names in named.items()
        for node in names
        if node not in nodes
    ]


def check_logins(config: Config) -> list[str]:
    """Return a remark on each secret that would go over the network as it is."""
    return [f"warning: {key} goes over the network unencrypted: {remedy}" for key, remedy in _open_secrets(config)]


def _open_secrets(config: Config) -> Iterator[tuple[str, str]]:
    cassandra, kafka, airflow = config.cassandra, config.kafka, config.airflow
    if cassandra.password and cassandra.tls is None and _is_far(*cassandra.contact_points):
        yield "cassandra.password", "set cassandra.tls"
    if _is_open(airflow.url):
        yield "airflow.password", "give airflow.url with https://"
    if kafka is None:
        return
    if kafka.sasl_mechanism and kafka.tls is None and _is_far(*kafka.bootstrap_servers):
        yield "the login to the brokers (kafka.sasl_mechanism)", "set kafka.tls"
    login, url = kafka.schema_registry_login, kafka.schema_registry_url
    if login and url and _is_open(url):
        yield "kafka.schema_registry_login", "give kafka.schema_registry_url with https://"
    for key, oauth in (("kafka.oauth", kafka.oauth), ("kafka.schema_registry_login.oauth", login and login.oauth)):
        if oauth and _is_open(oauth.token_url):
            yield f"{key}.client_secret", f"give {key}.token_url with https://"


def _is_open(url: str) -> bool:
    return url.startswith("http://") and _is_far(urlsplit(url).netloc)


def _is_far(*addresses: str) -> bool:
    return not all(address.startswith(_HERE) for address in addresses)
