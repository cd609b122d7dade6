"""Read the events of a Kafka topic from its beginning, with the times at which the broker appended them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from servers import ServerError

ANSWER_SECONDS = 60


@dataclass(frozen=True)
class Event:
    """One event.

    :ivar appended_ms: time when the broker appended it, ms since the epoch
    :ivar headers: the headers by name
    """

    key: bytes
    value: bytes
    appended_ms: int
    headers: dict[str, bytes]


def make_topics(bootstrap: str, topics: Sequence[str]) -> None:
    """Make topics of one partition whose events have the time at which the broker appended them."""
    config = {"message.timestamp.type": "LogAppendTime", "max.message.bytes": str(64 << 20)}
    admin = AdminClient({"bootstrap.servers": bootstrap})
    made = admin.create_topics([NewTopic(topic, 1, 1, config=config) for topic in topics])
    for future in made.values():
        future.result(ANSWER_SECONDS)


def end_of(bootstrap: str, topics: Sequence[str]) -> int:
    """Count the events of all topics; ends of transactions count, too."""
    consumer = _consumer(bootstrap)
    try:
        return sum(consumer.get_watermark_offsets(TopicPartition(topic, 0), ANSWER_SECONDS)[1] for topic in topics)
    finally:
        consumer.close()


def wait_until_quiet(bootstrap: str, topics: Sequence[str], wanted: int, idle_s: float, longest_s: float) -> int:
    """Wait until a number of events is there, or none has come for a while; return how many there are.

    :param idle_s: seconds, counted from the first event on
    :param longest_s: seconds until the first event must be there
    """
    began = changed = time.monotonic()
    count = 0
    while count < wanted and time.monotonic() - changed < (idle_s if count else longest_s):
        if time.monotonic() - began > longest_s + 600:
            break
        now = end_of(bootstrap, topics)
        if now != count:
            count, changed = now, time.monotonic()
        time.sleep(0.5)
    return count


def read_events(bootstrap: str, topic: str) -> Iterator[Event]:
    """Read all events that a topic has now.

    :raises ServerError: the broker does not send them
    """
    consumer = _consumer(bootstrap)
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        # Counting does not find the end: ends of transactions have offsets, too.
        while (one := consumer.poll(ANSWER_SECONDS)) is not None:
            if (error := one.error()) is not None:
                if error.code() == KafkaError._PARTITION_EOF:
                    return
                raise ServerError(f"{topic}: {error}")
            yield Event(one.key() or b"", one.value() or b"", one.timestamp()[1], headers_of(one))
        raise ServerError(f"The events of {topic} do not come.")
    finally:
        consumer.close()


def headers_of(message: Message) -> dict[str, bytes]:
    """Return headers by name."""
    found: Any = message.headers() or []
    return dict(found)


def _consumer(bootstrap: str) -> Consumer:
    return Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "bench", "enable.auto.commit": False, "enable.partition.eof": True}
    )
