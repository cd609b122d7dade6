"""Settings of the servers that the tests start."""

from dataclasses import replace
from typing import Any

from ringsync.cluster.session import ClusterSettings
from ringsync.config.sections import Tls
from servers.cassandra import SUPERUSER, CassandraNode


def settings_of(node: CassandraNode, **changes: Any) -> ClusterSettings:
    """How to reach the node with all rights."""
    found = ClusterSettings((node.settings.address,), node.settings.native_port, consistency_level="ONE")
    if node.settings.authenticator == "password":
        found = replace(found, username=SUPERUSER[0], password=SUPERUSER[1])
    if node.settings.client_tls:
        found = replace(found, tls=Tls(ca_file=str(node.settings.client_tls.authority)))
    return replace(found, **changes)
