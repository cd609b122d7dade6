"""A Kafka cluster as a place for messages: topics are made, messages sent and confirmed. The client is librdkafka's."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from types import TracebackType
from typing import Any, Literal

import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicCollection
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from ringsync.config import Tls
from ringsync.streams.relay_errors import BrokerUnavailableError, RelayError
from ringsync.streams.schema_registry import SchemaRegistry
from ringsync.streams.tokens import partition_of

Serialisation = Literal["avro", "json"]
PartitionBy = Literal["partition_key", "primary_key"]
SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]

_BY_KEY = -1
"""Instead of a partition: librdkafka chooses it by the key."""

MAX_MESSAGE_BYTES = 64 << 20
"""Of the topics that are made here. Cassandra takes mutations of up to 16 MiB, and a row may be made of several."""

_REFUSED = {
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.INVALID_REPLICATION_FACTOR,
    KafkaError.INVALID_PARTITIONS,
    KafkaError.INVALID_RECORD,
    KafkaError.POLICY_VIOLATION,
    KafkaError.TOPIC_EXCEPTION,
}
"""What does not pass by itself."""


@dataclass(frozen=True)
class KafkaSettings:
    """How a Kafka cluster is reached and what messages look like there.

    :ivar bootstrap_servers: ``host:port`` each
    :ivar json_schemas: for ``json``: whether each message has its schema beside its payload, or is the payload alone
    :ivar schema_registry_url: for ``avro``: where its schemas are registered; None: messages are plain Avro
    :ivar tls: to brokers and registry; None: brokers are spoken to in clear
    :ivar sasl_mechanism: with ``username`` and ``password``; None: no login
    :ivar partitions: of topics that are made
    :ivar replication_factor: of topics that are made; None: the brokers' default
    :ivar partition_by: what chooses a message's partition: Cassandra's partition key, by its token, so that all
        messages of a Cassandra partition are in one; or the message's whole key, as Java's producers do it
    :ivar answer_timeout_s: how long a broker may take to say that it is there
    :ivar delivery_timeout_s: how long a message may wait for its confirmation
    """

    bootstrap_servers: tuple[str, ...]
    serialisation: Serialisation = "avro"
    json_schemas: bool = True
    schema_registry_url: str | None = None
    tls: Tls | None = None
    sasl_mechanism: SaslMechanism | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    partitions: int = 4
    replication_factor: int | None = None
    partition_by: PartitionBy = "partition_key"
    answer_timeout_s: float = 10.0
    delivery_timeout_s: float = 60.0


class KafkaTopics:
    """The topics of a cluster, for one thread at a time: ``with KafkaTopics(settings) as kafka: …``.

    A message counts only after :meth:`confirm`. After an error what was not confirmed may be there or not; the next
    :meth:`open` begins anew.

    :ivar registry: the schema registry; None: there is none
    """

    def __init__(self, settings: KafkaSettings) -> None:
        self.settings = settings
        self.registry = _registry(settings)
        self._producer: Producer | None = None
        self._deliveries = _Deliveries()
        self._known: set[str] = set()
        self._partitions: dict[str, int] = {}
        self._last_error = ""

    def __enter__(self) -> KafkaTopics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give up what is not confirmed, and all connections."""
        if self._producer is not None:
            self._producer.purge()
            self._producer = None
        self._deliveries = _Deliveries()
        if self.registry is not None:
            self.registry.close()

    def open(self, topic: str) -> None:
        """Make sure that the cluster answers and the topic is there.

        :raises BrokerUnavailableError: no answer within ``answer_timeout_s``
        :raises RelayError: the topic is not there and may not be made
        """
        try:
            if topic not in self._known:
                self._make(topic)
                self._known.add(topic)
            if self._producer is None:
                self._producer = Producer(producer_settings(self.settings, self._note))
            # A topic may have got more of them.
            self._partitions[topic] = self._count_partitions(self._producer, topic)
        except KafkaException as error:
            if self._producer is not None:
                self._producer.poll(0)  # calls _note
            self.close()
            raise self._explained(error.args[0], f"topic {topic}") from error

    def send(
        self,
        topic: str,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        event_ids: Sequence[bytes],
        tokens: pa.Array,
        version: int,
    ) -> None:
        """Hand messages over, in order, after :meth:`open`.

        :param event_ids: go into the header ``event_id``
        :param tokens: int64, of the Cassandra partitions
        :param version: of the schema; goes into the header ``schema_version``
        :raises BrokerUnavailableError: an earlier message was not delivered in time
        :raises RelayError: the broker refused an earlier message
        """
        if self._producer is None:
            raise RelayError(f"topic {topic} was not opened")
        produce, failed = self._producer.produce, self._deliveries.failed
        schema_version = ("schema_version", str(version).encode())
        partitions: Iterable[int] = repeat(_BY_KEY, len(keys))
        if self.settings.partition_by == "partition_key":
            partitions = partition_of(tokens, self._partitions[topic])
        for key, value, event_id, partition in zip(keys, values, event_ids, partitions, strict=True):
            headers: Any = [("event_id", event_id), schema_version]
            while True:
                try:
                    produce(topic, value, key, partition, on_delivery=failed, headers=headers)
                    break
                except BufferError:
                    self._producer.poll(0.1)
                    self._check(topic)
                except KafkaException as error:
                    self.close()
                    raise self._explained(error.args[0], f"topic {topic}, event {event_id.decode()}") from error
        self._deliveries.sent += len(keys)
        self._producer.poll(0)
        self._check(topic)

    def confirm(self, topic: str) -> int:
        """Wait until Kafka has all that was sent since the last time, on all in-sync replicas.

        :returns: the number of messages
        :raises BrokerUnavailableError: one was not delivered in time
        :raises RelayError: the broker refused one
        """
        while self._producer is not None and self._producer.flush(1.0):
            self._check(topic)
        self._check(topic)
        done, self._deliveries = self._deliveries, _Deliveries()
        return done.sent

    def _check(self, topic: str) -> None:
        error = self._deliveries.error
        if error is not None:
            self.close()
            raise self._explained(error, f"topic {topic}")

    def _make(self, topic: str) -> None:
        admin = AdminClient(connection_settings(self.settings, self._note))
        timeout = self.settings.answer_timeout_s
        new = NewTopic(
            topic,
            num_partitions=self.settings.partitions,
            replication_factor=self.settings.replication_factor or -1,
            config={"max.message.bytes": str(MAX_MESSAGE_BYTES)},
        )
        try:
            if not _is_there(admin, topic, timeout):
                admin.create_topics([new], request_timeout=timeout)[topic].result()
        except KafkaException as error:
            admin.poll(0)  # calls _note
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise

    def _count_partitions(self, producer: Producer, topic: str) -> int:
        """Of a topic that is there; one that was made just now is not known at once."""
        timeout = self.settings.answer_timeout_s
        deadline = time.monotonic() + timeout
        while True:
            found = producer.list_topics(topic, timeout=timeout).topics[topic]
            if found.partitions:
                return len(found.partitions)
            if time.monotonic() > deadline:
                raise KafkaException(found.error or KafkaError(KafkaError._TIMED_OUT))
            time.sleep(0.1)

    def _note(self, error: KafkaError) -> None:
        """What librdkafka tells by the way: why a broker cannot be reached."""
        self._last_error = error.str()

    def _explained(self, error: KafkaError, where: str) -> RelayError:
        servers = ", ".join(self.settings.bootstrap_servers)
        reason = f"{error.str()}{self._last_error and f' (last: {self._last_error})'}"
        self._last_error = ""
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            return RelayError(f"Kafka at {servers} refuses a message, {where}: {reason}; raise its max.message.bytes")
        if error.code() in _REFUSED:
            return RelayError(f"Kafka at {servers} refuses, {where}: {reason}")
        return BrokerUnavailableError(f"Kafka at {servers} is not available, {where}: {reason}")


class _Deliveries:
    """What became of the messages sent since the last confirmation."""

    def __init__(self) -> None:
        self.sent = 0
        self.error: KafkaError | None = None

    def failed(self, error: KafkaError | None, _message: Message) -> None:
        if self.error is None:
            self.error = error


def _is_there(admin: AdminClient, topic: str, timeout: float) -> bool:
    try:
        admin.describe_topics(TopicCollection([topic]), request_timeout=timeout)[topic].result()
    except KafkaException as error:
        if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return False
        raise
    return True


def _registry(settings: KafkaSettings) -> SchemaRegistry | None:
    if settings.schema_registry_url is None:
        return None
    tls = settings.tls or Tls()
    own = (tls.certificate_file, tls.key_file) if tls.certificate_file and tls.key_file else None
    return SchemaRegistry(settings.schema_registry_url, tls.ca_file, own)


def producer_settings(settings: KafkaSettings, on_error: Any) -> dict[str, Any]:
    """The configuration of a producer that loses and reorders nothing.

    :param on_error: called with errors that concern no single message
    """
    return {
        **connection_settings(settings, on_error),
        "acks": "all",
        "enable.idempotence": True,
        # A report of each message would be a Python object made of it: flush() says when none is waiting.
        "delivery.report.only.error": True,
        "message.timeout.ms": int(settings.delivery_timeout_s * 1000),
        # For partition_by primary_key. Java's default, so that other producers put a key into the same partition.
        "partitioner": "murmur2_random",
        "compression.type": "lz4",
        "linger.ms": 20,
        "batch.size": 1_000_000,
        "batch.num.messages": 100_000,
        "queue.buffering.max.messages": 500_000,
        "queue.buffering.max.kbytes": 256 << 10,
        "message.max.bytes": MAX_MESSAGE_BYTES,
    }


def connection_settings(settings: KafkaSettings, on_error: Any) -> dict[str, Any]:
    """What every client of the cluster is configured with; holds the password."""
    tls, login = settings.tls, settings.sasl_mechanism
    found: dict[str, Any] = {
        "bootstrap.servers": ",".join(settings.bootstrap_servers),
        "client.id": "ringsync",
        # What fails is in our errors; librdkafka would log each attempt to connect.
        "log_level": 2,
        "security.protocol": ("SASL_" if login else "") + ("SSL" if tls else "PLAINTEXT"),
        "error_cb": on_error,
    }
    if tls:
        files = {"ca": tls.ca_file, "certificate": tls.certificate_file, "key": tls.key_file}
        found |= {f"ssl.{name}.location": path for name, path in files.items() if path}
        found["ssl.endpoint.identification.algorithm"] = "https" if tls.verify_hostname else "none"
    if login:
        found |= {"sasl.mechanism": login, "sasl.username": settings.username, "sasl.password": settings.password}
    return found
