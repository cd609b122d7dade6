"""librdkafka's own mock cluster: brokers without a server, whose partitions can lose their leaders."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import confluent_kafka

_LIBRARY = next(Path(f"{confluent_kafka.__path__[0]}.libs").glob("librdkafka-*.so*"))
_NO_BROKER = _ALL_BROKERS = -1
_REASON_BYTES = 512


class MockKafka:
    """Brokers in this process; they take transactions, but make no topics for an admin client.

    :param library: librdkafka
    :param cluster: its handle
    """

    def __init__(self, library: ctypes.CDLL, cluster: int) -> None:
        self._library = library
        self._cluster = ctypes.c_void_p(cluster)

    @property
    def bootstrap(self) -> str:
        """What clients call ``bootstrap.servers``."""
        found = self._library.rd_kafka_mock_cluster_bootstraps
        found.restype = ctypes.c_char_p
        name: bytes = found(self._cluster)
        return name.decode()

    def make(self, topic: str, partitions: int = 4) -> None:
        """Make a topic."""
        assert self._library.rd_kafka_mock_topic_create(self._cluster, topic.encode(), partitions, 1) == 0

    def forsake(self, topic: str, partitions: int = 4) -> None:
        """Take the leaders of a topic's partitions away."""
        for partition in range(partitions):
            set_leader = self._library.rd_kafka_mock_partition_set_leader
            assert set_leader(self._cluster, topic.encode(), partition, _NO_BROKER) == 0

    def answer_after(self, milliseconds: int) -> None:
        """Have every answer take so long."""
        set_rtt = self._library.rd_kafka_mock_broker_set_rtt
        assert set_rtt(self._cluster, _ALL_BROKERS, milliseconds) == 0


@contextmanager
def mock_kafka() -> Iterator[MockKafka]:
    """A cluster of one broker."""
    library = ctypes.CDLL(str(_LIBRARY))
    reason = ctypes.create_string_buffer(_REASON_BYTES)
    library.rd_kafka_conf_new.restype = ctypes.c_void_p
    library.rd_kafka_new.restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_new.restype = ctypes.c_void_p
    client = library.rd_kafka_new(0, ctypes.c_void_p(library.rd_kafka_conf_new()), reason, _REASON_BYTES)
    assert client, reason.value
    cluster = library.rd_kafka_mock_cluster_new(ctypes.c_void_p(client), 1)
    try:
        yield MockKafka(library, cluster)
    finally:
        library.rd_kafka_mock_cluster_destroy(ctypes.c_void_p(cluster))
        library.rd_kafka_destroy(ctypes.c_void_p(client))
