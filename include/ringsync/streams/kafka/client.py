"""A Kafka cluster that takes messages: it creates topics, sends messages and confirms them. The client is librdkafka's.

Only the process that opened a topic last can send to it. All processes use the same transactional id for a topic, so
opening it shuts out earlier processes, even one that was only asleep.
"""

from __future__ import annotations

import math
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import repeat
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from confluent_kafka import KafkaError, KafkaException, Producer, TopicCollection
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from ringsync.avro.mapping import AvroRecord
from ringsync.avro.to_json import json_converter
from ringsync.config import Tls
from ringsync.config.sections import RegistryLogin
from ringsync.config.sync import BrokerOAuth
from ringsync.streams.kafka.sender import COMMIT_AFTER_S, TRANSACTION_S, Sender, serve
from ringsync.streams.part_index import MessageBlock
from ringsync.streams.sink import KAFKA, AnotherRelayError, BrokerUnavailableError, RelayError
from ringsync.streams.tokens import partition_of

if TYPE_CHECKING:
    from ringsync.streams.kafka.schema_registry import SchemaRegistry

Serialisation = Literal["avro", "json"]
Serialise = Callable[[MessageBlock], tuple[Sequence[bytes], Sequence[bytes]]]
"""Writer of the keys and values of messages in Kafka's form."""

PartitionBy = Literal["partition_key", "primary_key"]
SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]

_BY_KEY = -1
"""Partition number that lets librdkafka choose the partition by the key."""

MAX_MESSAGE_BYTES = 64 << 20
"""Limit of new topics. Cassandra takes mutations of up to 16 MiB, and a row may consist of several."""

TRANSACTIONAL_IDS = "ringsync-"
"""Prefix of our transactional ids; brokers that check rights must allow us these."""

LEADERS_S = 2.0
"""Longest wait for partitions without a leader. Sending anyway would take until the timeout of the delivery."""

_STEP_S = 1.0
"""Length of one wait for the cluster; then the caller is asked whether to wait on."""

_ANY_TOPIC = "ringsync"
"""Topic to ask the cluster about; any reply shows that it answers."""

_OVERHEAD_BYTES = 400
"""Memory that a message in librdkafka's queue takes besides key and value, with its headers."""

_FENCED = {
    KafkaError._FENCED,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.INVALID_PRODUCER_ID_MAPPING,
}
"""Another process has opened the topic, or the broker has ended our transaction because it took too long."""

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
"""Errors that do not pass by themselves."""


@dataclass(frozen=True)
class KafkaSettings:
    """Connection to a Kafka cluster and form of the messages.

    :ivar bootstrap_servers: brokers, ``host:port`` each
    :ivar json_schemas: for ``json``: whether each message has its schema beside its payload; False: the payload alone
    :ivar schema_registry_url: address of the registry of ``avro`` schemas; None: messages are plain Avro
    :ivar schema_registry_login: None: no login to the registry
    :ivar new_subject_compatibility: what the registry takes as the next versions of subjects that are new; None: its
        default
    :ivar tls: TLS to brokers and registry; None: none to brokers
    :ivar sasl_mechanism: mechanism of the login with ``username`` and ``password``, or with ``oauth``; None: no login
    :ivar partitions: number of partitions of new topics
    :ivar replication_factor: replication factor of new topics; None: the brokers' default
    :ivar partition_by: choice of a message's partition: by the token of Cassandra's partition key, so that all messages
        of a Cassandra partition are in one; or by the message's whole key, as Java's producers do it
    :ivar topic_name: names of topics that are not those of their streams, by these
    :ivar answer_timeout_s: longest time for a broker's answer
    :ivar delivery_timeout_s: longest time in which Kafka takes nothing
    """

    bootstrap_servers: tuple[str, ...]
    serialisation: Serialisation = "avro"
    json_schemas: bool = True
    schema_registry_url: str | None = None
    schema_registry_login: RegistryLogin | None = None
    new_subject_compatibility: str | None = "BACKWARD"
    tls: Tls | None = None
    sasl_mechanism: SaslMechanism | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    oauth: BrokerOAuth | None = None
    partitions: int = 4
    replication_factor: int | None = None
    partition_by: PartitionBy = "partition_key"
    topic_name: Mapping[str, str] = field(default_factory=dict)
    answer_timeout_s: float = 10.0
    delivery_timeout_s: float = 60.0


class KafkaTopics:
    """The topics of a cluster as a sink: ``with KafkaTopics(settings) as kafka: …``.

    An open topic has a producer, with some threads and connections; opening it again takes some requests.

    :param registry: schema registry, which other topics may share; None: its own, if there is one
    :ivar registry: schema registry; None: there is none
    """

    name = KAFKA

    def __init__(self, settings: KafkaSettings, registry: SchemaRegistry | None = None) -> None:
        self.settings = settings
        self.registry = registry or registry_of(settings)
        self.confirmed = 0
        self.waits_since = math.inf
        self._senders: dict[str, Sender] = {}
        self._serialisers: dict[tuple[str, int], Serialise] = {}
        self._known: set[str] = set()
        self._last_error = ""

    def __enter__(self) -> KafkaTopics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give up unconfirmed messages and all connections."""
        for topic in list(self._senders):
            self.give_up(topic)

    def check_answers(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Make sure that the cluster answers within ``answer_timeout_s``: :meth:`Sink.check_answers`."""
        try:
            admin = AdminClient({**connection_settings(self.settings, self._note), "allow.auto.create.topics": False})
        except KafkaException as error:  # a certificate that is just being replaced
            raise self._explained(error.args[0], "all topics") from error
        answers: list[KafkaError | None] = []

        def ask() -> None:
            # One topic is enough, even if it does not exist: the list of all topics is long.
            try:
                admin.list_topics(_ANY_TOPIC, timeout=self.settings.answer_timeout_s)
                answers.append(None)
            except KafkaException as error:
                answers.append(error.args[0])

        asking = threading.Thread(target=ask, name="kafka-answers", daemon=True)
        asking.start()
        while asking.is_alive() and not stop():
            asking.join(_STEP_S)
        reason = answers[0] if answers else KafkaError(KafkaError._TIMED_OUT)
        if reason is not None:
            admin.poll(0)  # calls _note
            raise self._explained(reason, "all topics")

    def is_open(self, topic: str) -> bool:
        """Tell whether the topic has a producer: :meth:`Sink.is_open`."""
        return topic in self._senders

    @property
    def queued_bytes(self) -> int:
        """Approximate memory of librdkafka's queues: :attr:`Sink.queued_bytes`."""
        return sum(len(sender.producer) * sender.message_bytes for sender in list(self._senders.values()))

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Note in ``waits_since`` that this process waits for a server."""
        self.waits_since = time.monotonic()
        try:
            yield
        finally:
            self.waits_since = math.inf

    def topic_of(self, stream: str) -> str:
        """Name the topic of a stream: :meth:`Sink.topic_of`."""
        return self.settings.topic_name.get(stream, stream)

    def open(self, topic: str) -> bool:
        """Begin transactions, after the topic was created if there is none: :meth:`Sink.open`."""
        self._serialisers.clear()
        try:
            with self.waits():
                if topic not in self._known:
                    self._make(topic)
                    self._known.add(topic)
                sender = self._senders.get(topic) or self._begin(topic)
                self._senders[topic] = sender
                # A topic may have got more partitions.
                sender.partitions = self._count_partitions(sender.producer, topic)
        except KafkaException as error:
            raise self._failed(topic, error) from error
        return not sender.used

    def send(self, topic: str, messages: MessageBlock, schemas: Callable[[int], tuple[AvroRecord, AvroRecord]]) -> None:
        """Hand messages over, with the headers ``event_id`` and ``schema_version``: :meth:`Sink.send`.

        :raises BrokerUnavailableError: Kafka has taken nothing for ``delivery_timeout_s``
        """
        sender = self._senders.get(topic)
        if sender is None:
            raise RelayError(f"topic {topic} was not opened")
        version = messages.schema_version
        if (topic, version) not in self._serialisers:
            self._serialisers[topic, version] = self._serialiser(topic, *schemas(version))
        keys, values = self._serialisers[topic, version](messages)
        schema_version = ("schema_version", str(version).encode())
        partitions: Iterable[int] = repeat(_BY_KEY, len(keys))
        if self.settings.partition_by == "partition_key":
            partitions = partition_of(messages.tokens, sender.partitions)
        try:
            sender.begin()
            sender.message_bytes = _OVERHEAD_BYTES + (sum(map(len, keys)) + sum(map(len, values))) // max(len(keys), 1)
            produce = sender.producer.produce
            room = 0
            for key, value, event_id, partition in zip(keys, values, messages.event_ids, partitions, strict=True):
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
        """Tell whether a slow Kafka keeps the transaction open for too long: :meth:`Sink.is_long`."""
        sender = self._senders.get(topic)
        return sender is not None and time.monotonic() - sender.begun_at > COMMIT_AFTER_S

    def confirm(self, topic: str) -> int:
        """Commit the transaction, which all in-sync replicas then have: :meth:`Sink.confirm`.

        :raises BrokerUnavailableError: Kafka has taken nothing for ``delivery_timeout_s``
        """
        sender = self._senders.get(topic)
        if sender is None:
            return 0
        try:
            with self.waits():
                sender.commit()
        except KafkaException as error:
            raise self._failed(topic, error) from error
        confirmed, sender.sent = sender.sent, 0
        self.confirmed += confirmed
        return confirmed

    def give_up(self, topic: str) -> None:
        """Abort the transaction, and let the producer go: :meth:`Sink.give_up`."""
        sender = self._senders.pop(topic, None)
        if sender is not None:
            with self.waits():
                sender.abort(self.settings.answer_timeout_s)

    def _serialiser(self, topic: str, key: AvroRecord, value: AvroRecord) -> Serialise:
        """Return the writer of messages that follow a version of the schemas."""
        if self.settings.serialisation == "json":
            of_key, of_value = (json_converter(one, with_schema=self.settings.json_schemas) for one in (key, value))
            return lambda block: (of_key(block.keys), of_value(block.values))
        if self.registry is None:
            return lambda block: (block.keys, block.values)
        with self.waits():
            of_keys = _confluent_prefix(self.registry.register(f"{topic}-key", key))
            of_values = _confluent_prefix(self.registry.register(f"{topic}-value", value))
        return lambda block: ([of_keys + datum for datum in block.keys], [of_values + datum for datum in block.values])

    def _failed(self, topic: str, error: KafkaException) -> RelayError:
        """Return the error to raise; the next :meth:`open` begins anew, and creates the topic if it was deleted.

        Nothing is aborted, because messages on their way could arrive after the abort. Beginning anew ends them.
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
        """Create a producer that shuts out all earlier ones; their uncommitted messages are aborted."""
        transactional_id = {"transactional.id": f"{TRANSACTIONAL_IDS}{topic}"}
        producer = Producer({**producer_settings(self.settings, self._note), **transactional_id})
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
        """Count the partitions of a topic once all have leaders, which takes a new topic a moment."""
        timeout = self.settings.answer_timeout_s
        begun = time.monotonic()
        while True:
            metadata = producer.list_topics(topic, timeout=timeout).topics[topic]
            partitions = metadata.partitions
            if partitions and all(partition.leader >= 0 for partition in partitions.values()):
                return len(partitions)
            if time.monotonic() - begun > (LEADERS_S if partitions else timeout):
                missing = KafkaError.LEADER_NOT_AVAILABLE if partitions else KafkaError._TIMED_OUT
                raise KafkaException(metadata.error or KafkaError(missing))
            time.sleep(0.1)

    def _note(self, error: KafkaError) -> None:
        """Keep the reason that librdkafka gives in passing: why it cannot reach a broker."""
        self._last_error = error.str()

    def _explained(self, error: KafkaError, where: str) -> RelayError:
        servers = ", ".join(self.settings.bootstrap_servers)
        reason = f"{told(error)}{self._last_error and f' (last: {self._last_error})'}"
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
        if error.code() == KafkaError.TOPIC_EXCEPTION:
            reason += "; if another topic has a name that Kafka takes for the same, choose one in kafka.topic_name"
        if error.code() in _REFUSED:
            return RelayError(f"Kafka at {servers} refuses, {where}: {reason}")
        return BrokerUnavailableError(f"Kafka at {servers} is not available, {where}: {reason}")


def told(error: KafkaError) -> str:
    """Return what an error says, with the keys to look at if it is about TLS."""
    hint = "; check the files of kafka.tls, and its key_password" if ": ssl." in error.str() else ""
    return f"{error.str()}{hint}"


def _confluent_prefix(schema_id: int) -> bytes:
    """Return the prefix of a datum in Confluent's wire format: 0 and the schema's id."""
    return struct.pack(">bI", 0, schema_id)


def _is_there(admin: AdminClient, topic: str, timeout: float) -> bool:
    try:
        admin.describe_topics(TopicCollection([topic]), request_timeout=timeout)[topic].result()
    except KafkaException as error:
        if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return False
        raise
    return True


def registry_of(settings: KafkaSettings) -> SchemaRegistry | None:
    """Return the schema registry, which is asked for nothing yet; None: there is none."""
    if settings.schema_registry_url is None:
        return None
    from ringsync.streams.kafka.schema_registry import SchemaRegistry

    return SchemaRegistry(
        settings.schema_registry_url, settings.tls, settings.schema_registry_login, settings.new_subject_compatibility
    )


def producer_settings(settings: KafkaSettings, on_error: Any) -> dict[str, Any]:
    """Return the configuration of a producer that neither loses nor reorders messages.

    :param on_error: function that gets errors that concern no single message
    """
    return {
        **connection_settings(settings, on_error),
        "acks": "all",
        "enable.idempotence": True,
        # A report of each message would cost a Python object, and undelivered messages cannot be committed anyway.
        "delivery.report.only.error": True,
        # A message may wait for long, as long as Kafka takes others (streams/kafka/sender.py).
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
    """Return the configuration of all clients of the cluster; it holds the password.

    :raises ConfigError: a secret cannot be read
    """
    tls, login = settings.tls, settings.sasl_mechanism
    configuration: dict[str, Any] = {
        "bootstrap.servers": ",".join(settings.bootstrap_servers),
        "client.id": "ringsync",
        # Our errors say what fails; librdkafka would log each attempt to connect.
        "log_level": 2,
        "security.protocol": ("SASL_" if login else "") + ("SSL" if tls else "PLAINTEXT"),
        "error_cb": on_error,
    }
    if tls:
        # A key may be in the certificate's file; librdkafka wants to be told.
        key_file = tls.key_file or tls.certificate_file
        files = {"ca": tls.ca_file, "certificate": tls.certificate_file, "key": key_file}
        configuration |= {f"ssl.{name}.location": path for name, path in files.items() if path}
        if tls.key_password:
            configuration["ssl.key.password"] = tls.key_password.resolve("kafka.tls.key_password")
        configuration["ssl.endpoint.identification.algorithm"] = "https" if tls.verify_hostname else "none"
    if login:
        configuration["sasl.mechanism"] = login
    if settings.oauth:
        configuration |= _oauth_settings(settings.oauth)
    elif login:
        configuration |= {"sasl.username": settings.username, "sasl.password": settings.password}
    return configuration


def _oauth_settings(oauth: BrokerOAuth) -> dict[str, Any]:
    """Return the configuration of librdkafka's own client of token servers."""
    optional = {"scope": oauth.scope, "extensions": ",".join(f"{key}={text}" for key, text in oauth.extensions.items())}
    return {
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.token.endpoint.url": oauth.token_url,
        "sasl.oauthbearer.client.id": oauth.client_id,
        "sasl.oauthbearer.client.secret": oauth.client_secret.resolve("kafka.oauth.client_secret"),
        **{f"sasl.oauthbearer.{key}": text for key, text in optional.items() if text},
    }
