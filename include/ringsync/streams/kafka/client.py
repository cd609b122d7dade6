"""A Kafka cluster as a place for messages: topics are made, messages sent and confirmed. The client is librdkafka's.

Of all processes that send to a topic only the one that began last can do so: its transactional id is that of the topic,
and whoever begins later takes it away from whoever began before, who may be asleep.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import repeat
from types import TracebackType
from typing import Any, Literal

import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Producer, TopicCollection
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from ringsync.config import Tls
from ringsync.streams.kafka.errors import AnotherRelayError, BrokerUnavailableError, RelayError
from ringsync.streams.kafka.schema_registry import SchemaRegistry
from ringsync.streams.kafka.sender import COMMIT_AFTER_S, TRANSACTION_S, Sender, serve
from ringsync.streams.tokens import partition_of

Serialisation = Literal["avro", "json"]
PartitionBy = Literal["partition_key", "primary_key"]
SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]

_BY_KEY = -1
"""Instead of a partition: librdkafka chooses it by the key."""

MAX_MESSAGE_BYTES = 64 << 20
"""Of the topics that are made here. Cassandra takes mutations of up to 16 MiB, and a row may be made of several."""

TRANSACTIONAL_IDS = "ringsync-"
"""What our transactional ids begin with; brokers that check rights must allow us these."""

LEADERS_S = 2.0
"""A topic with partitions that have no leader for so long is not sent to: it would take until the time for delivery."""

_STEP_S = 1.0
"""So long the cluster is waited for at a time, while it is asked whether to wait on."""

_ANY_TOPIC = "ringsync"
"""Whatever a cluster says of it, it answers."""

_OVERHEAD_BYTES = 400
"""Of a message in librdkafka's queue, with its headers."""

_FENCED = {
    KafkaError._FENCED,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.INVALID_PRODUCER_ID_MAPPING,
}
"""Somebody else has begun to send to the topic, or the broker has ended our transaction, since it took too long."""

_REFUSED = {
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.INVALID_TRANSACTION_TIMEOUT,
    KafkaError.UNSUPPORTED_VERSION,
    KafkaError._UNSUPPORTED_FEATURE,
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
    :ivar schema_registry_url: address of the registry of ``avro`` schemas; None: messages are plain Avro
    :ivar tls: TLS to brokers and registry; None: none to brokers
    :ivar sasl_mechanism: with ``username`` and ``password``; None: no login
    :ivar partitions: number of partitions of new topics
    :ivar replication_factor: replication factor of new topics; None: the brokers' default
    :ivar partition_by: what chooses a message's partition: Cassandra's partition key, by its token, so that all
        messages of a Cassandra partition are in one; or the message's whole key, as Java's producers do it
    :ivar answer_timeout_s: how long a broker may take to say that it is there
    :ivar delivery_timeout_s: how long Kafka is waited for that takes nothing
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
    :meth:`open` begins anew. A topic that is open has a producer, with some threads and connections, until it is given
    up; to open it again takes some requests.

    :ivar registry: the schema registry; None: there is none
    :ivar confirmed: messages, since the beginning
    :ivar waits_since: time when the wait for Kafka or the registry began, by the monotonic clock; infinite: no wait
    """

    def __init__(self, settings: KafkaSettings) -> None:
        self.settings = settings
        self.registry = _registry(settings)
        self.confirmed = 0
        self.waits_since = math.inf
        self._senders: dict[str, Sender] = {}
        self._known: set[str] = set()
        self._last_error = ""

    def __enter__(self) -> KafkaTopics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give up what is not confirmed, and all connections."""
        for topic in list(self._senders):
            self.give_up(topic)

    def check_answers(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Make sure that the cluster answers, whatever it says of a topic.

        :param stop: asked every second or so; True: it is not waited for any longer
        :raises BrokerUnavailableError: no answer within ``answer_timeout_s``
        """
        try:
            admin = AdminClient({**connection_settings(self.settings, self._note), "allow.auto.create.topics": False})
        except KafkaException as error:  # a certificate that is just being replaced
            raise self._explained(error.args[0], "all topics") from error
        found: list[KafkaError | None] = []

        def ask() -> None:
            # Of one topic, be it there or not: that of all topics is long.
            try:
                admin.list_topics(_ANY_TOPIC, timeout=self.settings.answer_timeout_s)
                found.append(None)
            except KafkaException as error:
                found.append(error.args[0])

        asking = threading.Thread(target=ask, name="kafka-answers", daemon=True)
        asking.start()
        while asking.is_alive() and not stop():
            asking.join(_STEP_S)
        reason = found[0] if found else KafkaError(KafkaError._TIMED_OUT)
        if reason is not None:
            admin.poll(0)  # calls _note
            raise self._explained(reason, "all topics")

    def is_open(self, topic: str) -> bool:
        """Tell whether messages can be sent and confirmed: after an error of the broker they cannot."""
        return topic in self._senders

    @property
    def queued_bytes(self) -> int:
        """About how much memory is taken by messages that Kafka does not have yet; for any thread."""
        return sum(len(sender.producer) * sender.message_bytes for sender in list(self._senders.values()))

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Tell by ``waits_since`` that somebody else is waited for."""
        self.waits_since = time.monotonic()
        try:
            yield
        finally:
            self.waits_since = math.inf

    def open(self, topic: str) -> bool:
        """Make sure that the cluster answers, the topic is there, and nobody who opened it before can send to it.

        :returns: whether nothing was sent since it began: only now it is sure how far others have come
        :raises BrokerUnavailableError: no answer within ``answer_timeout_s``
        :raises RelayError: the topic is not there and may not be made, or the broker refuses transactions
        """
        try:
            with self.waits():
                if topic not in self._known:
                    self._make(topic)
                    self._known.add(topic)
                sender = self._senders.get(topic) or self._begin(topic)
                self._senders[topic] = sender
                # A topic may have got more of them.
                sender.partitions = self._count_partitions(sender.producer, topic)
        except KafkaException as error:
            raise self._failed(topic, error) from error
        return not sender.used

    def send(
        self,
        topic: str,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        event_ids: Sequence[bytes],
        tokens: pa.Array,
        version: int,
    ) -> None:
        """Hand messages over, in order, after :meth:`open`: as fast as Kafka takes them.

        :param event_ids: go into the header ``event_id``
        :param tokens: int64, of the Cassandra partitions
        :param version: the schema's version, for the header ``schema_version``
        :raises BrokerUnavailableError: Kafka has taken nothing for ``delivery_timeout_s``
        :raises AnotherRelayError: another process has opened the topic since
        :raises RelayError: the broker refused an earlier message
        """
        sender = self._senders.get(topic)
        if sender is None:
            raise RelayError(f"topic {topic} was not opened")
        schema_version = ("schema_version", str(version).encode())
        partitions: Iterable[int] = repeat(_BY_KEY, len(keys))
        if self.settings.partition_by == "partition_key":
            partitions = partition_of(tokens, sender.partitions)
        try:
            sender.begin()
            sender.message_bytes = _OVERHEAD_BYTES + (sum(map(len, keys)) + sum(map(len, values))) // max(len(keys), 1)
            produce = sender.producer.produce
            room = 0
            for key, value, event_id, partition in zip(keys, values, event_ids, partitions, strict=True):
                headers: Any = [("event_id", event_id), schema_version]
                if not room:
                    with self.waits():
                        room = sender.room()
                room -= 1
                sender.handed_over += 1
                while True:
                    try:
                        produce(topic, value, key, partition, headers=headers)
                        break
                    except BufferError:
                        with self.waits():
                            sender.wait_for_half()
            sender.sent += len(keys)
            serve(sender.producer.poll, 0)
        except KafkaException as error:
            raise self._failed(topic, error) from error

    def is_long(self, topic: str) -> bool:
        """Tell whether what was sent is to be confirmed now: the transaction is open for long, as Kafka is slow."""
        sender = self._senders.get(topic)
        return sender is not None and time.monotonic() - sender.begun_at > COMMIT_AFTER_S

    def confirm(self, topic: str) -> int:
        """Wait until Kafka has all that was sent since the last time, on all in-sync replicas.

        :returns: the number of messages
        :raises BrokerUnavailableError: Kafka has taken nothing for ``delivery_timeout_s``
        :raises AnotherRelayError: another process has opened the topic since: who reads committed messages gets none
        :raises RelayError: the broker refused one
        """
        sender = self._senders.get(topic)
        if sender is None:
            return 0
        try:
            with self.waits():
                sender.commit()
        except KafkaException as error:
            raise self._failed(topic, error) from error
        done, sender.sent = sender.sent, 0
        self.confirmed += done
        return done

    def give_up(self, topic: str) -> None:
        """Take back what was sent and not confirmed; the next :meth:`open` begins anew."""
        sender = self._senders.pop(topic, None)
        if sender is not None:
            with self.waits():
                sender.abort(self.settings.answer_timeout_s)

    def _failed(self, topic: str, error: KafkaException) -> RelayError:
        """Return what to raise for an error; the next :meth:`open` begins anew, and makes the topic if it was deleted.

        Nothing is aborted: what is on its way could come behind the abort. To begin anew ends it for good.
        """
        self._known.discard(topic)
        sender = self._senders.pop(topic, None)
        reason: KafkaError = error.args[0]
        if sender is not None:
            reason = sender.reason(reason)
            sender.producer.purge()
            with suppress(KafkaException):
                serve(sender.producer.poll, 0)  # calls _note
        return self._explained(reason, f"topic {topic}")

    def _begin(self, topic: str) -> Sender:
        """A producer that takes the topic away from all that began before; what they have not committed is aborted."""
        own = {"transactional.id": f"{TRANSACTIONAL_IDS}{topic}"}
        producer = Producer({**producer_settings(self.settings, self._note), **own})
        try:
            producer.init_transactions(self.settings.answer_timeout_s)
        except KafkaException:
            serve(producer.poll, 0)  # calls _note
            raise
        return Sender(producer, self.settings.delivery_timeout_s)

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
        """Of a topic that is there, and led; one that was made just now is not so at once."""
        timeout = self.settings.answer_timeout_s
        begun = time.monotonic()
        while True:
            found = producer.list_topics(topic, timeout=timeout).topics[topic]
            if found.partitions and all(one.leader >= 0 for one in found.partitions.values()):
                return len(found.partitions)
            if time.monotonic() - begun > (LEADERS_S if found.partitions else timeout):
                missing = KafkaError.LEADER_NOT_AVAILABLE if found.partitions else KafkaError._TIMED_OUT
                raise KafkaException(found.error or KafkaError(missing))
            time.sleep(0.1)

    def _note(self, error: KafkaError) -> None:
        """Return what librdkafka tells by the way: why a broker cannot be reached."""
        self._last_error = error.str()

    def _explained(self, error: KafkaError, where: str) -> RelayError:
        servers = ", ".join(self.settings.bootstrap_servers)
        reason = f"{error.str()}{self._last_error and f' (last: {self._last_error})'}"
        self._last_error = ""
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            return RelayError(f"Kafka at {servers} refuses a message, {where}: {reason}; raise its max.message.bytes")
        if error.code() in _FENCED:
            return AnotherRelayError(
                f"another process relays too, {where}, to Kafka at {servers}, or this one stood still for too long: "
                f"{reason}; what Kafka had not confirmed is sent again"
            )
        if error.code() == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
            return RelayError(
                f"Kafka at {servers} refuses, {where}: {reason}; allow Write and Describe on transactional ids that "
                f"begin with {TRANSACTIONAL_IDS}"
            )
        if error.code() in _REFUSED:
            return RelayError(f"Kafka at {servers} refuses, {where}: {reason}")
        return BrokerUnavailableError(f"Kafka at {servers} is not available, {where}: {reason}")


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
    """Return the configuration of a producer that loses and reorders nothing.

    :param on_error: called with errors that concern no single message
    """
    return {
        **connection_settings(settings, on_error),
        "acks": "all",
        "enable.idempotence": True,
        # A report of each message would be a Python object made of it: what is not delivered cannot be committed.
        "delivery.report.only.error": True,
        # How long a message waits is no matter, as long as others are taken (kafka_sender).
        "message.timeout.ms": int(TRANSACTION_S * 1000),
        "transaction.timeout.ms": int(TRANSACTION_S * 1000),
        # For partition_by primary_key. Java's default, so that other producers put a key into the same partition.
        "partitioner": "murmur2_random",
        "compression.type": "lz4",
        "linger.ms": 20,
        "batch.size": 1_000_000,
        "batch.num.messages": 100_000,
        "queue.buffering.max.messages": 500_000,
        "queue.buffering.max.kbytes": 128 << 10,
        "message.max.bytes": MAX_MESSAGE_BYTES,
    }


def connection_settings(settings: KafkaSettings, on_error: Any) -> dict[str, Any]:
    """Return what every client of the cluster is configured with; holds the password."""
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
