"""The settings that each part of ringsync gets from the configuration: cluster, brokers, limits, object store.

Each setting has the name of its key in the configuration. Each function imports the driver it needs: a Spark worker
that opens the object store must not load Kafka's. ConfigError: a secret cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ringsync.config import Config, ConfigError

if TYPE_CHECKING:
    from ringsync.cluster.limits import Limits
    from ringsync.cluster.session import ClusterSettings
    from ringsync.storage.port import ObjectStore
    from ringsync.streams.kafka.client import KafkaSettings
    from ringsync.streams.sink import Sink


def cluster_settings(config: Config) -> ClusterSettings:
    """Describe the connection to the cluster, with its secrets."""
    from ringsync.cluster.session import ClusterSettings

    source = config.cassandra
    password = source.password.resolve("cassandra.password") if source.password else None
    return ClusterSettings(**{**dict(source), "password": password})


def kafka_settings(config: Config) -> KafkaSettings | None:
    """Describe the connection to the brokers, with its password; None: no brokers are configured.

    The secrets of ``oauth`` and of the registry may change meanwhile: who uses them reads them. Here they only have to
    be there.
    """
    kafka = config.kafka
    if kafka is None:
        return None
    from ringsync.streams.kafka.client import KafkaSettings

    secrets = {key: secret.resolve(key) for key, secret in kafka.secrets("kafka").items()}
    own = {"topic_name": config.kafka_topics, "password": secrets.get("kafka.password")}
    return KafkaSettings(**{**dict(kafka), **own})


def sink_of(config: Config) -> Callable[[], Sink] | None:
    """Return what connects to the sink of published messages; None: none is configured, and they are files only."""
    if (settings := kafka_settings(config)) is None:
        return None
    from ringsync.streams.kafka.client import KafkaTopics, registry_of

    return partial(KafkaTopics, settings, registry_of(settings))


def cluster_limits(config: Config) -> Limits:
    """Return the configured limits; operators can set others while ringsync runs (docs/bootstrap.md)."""
    from ringsync.cluster.limits import Limits

    megabytes = config.limits.megabytes_per_s
    return Limits(
        rows_per_s=config.limits.rows_per_s,
        bytes_per_s=None if megabytes is None else megabytes * 1e6,
        concurrent_requests=config.limits.concurrent_requests,
    )


def store_of(config: Config) -> ObjectStore:
    """Open the object store.

    :raises ConfigError: ringsync does not know this kind of URL
    """
    from ringsync.storage import open_store

    try:
        return open_store(**dict(config.store))
    except ValueError as error:
        raise ConfigError(f"store.url: {error}") from None
