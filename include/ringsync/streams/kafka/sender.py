"""The producer of a Kafka topic: its transaction, and the number of messages that may wait for Kafka.

However slow Kafka is, about as many messages wait as it takes during a transaction. So a transaction ends long before
its timeout, and a Kafka is given up only if it takes nothing at all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from confluent_kafka import KafkaError, KafkaException, Producer

COMMIT_AFTER_S = 10.0
"""Longest time for which a transaction stays open while messages are sent: readers of committed ones wait for it."""

TRANSACTION_S = 300.0
"""Time after which the broker ends a transaction. By default it allows 15 minutes (``transaction.max.timeout.ms``)."""

FIRST_BYTES = 256 << 10
"""Bytes that are handed over before Kafka's speed is known."""

_CAUSE_S = 2.0
"""Longest wait for the cause of a failure. librdkafka's own thread tells it, at once if the machine is not busy."""

_POLL_S = 0.01


class Sender:
    """The producer of a topic, and its transaction.

    :param patience_s: time without progress after which Kafka is given up, s
    :ivar partitions: number of the topic's partitions
    :ivar sent: number of messages since the last confirmation
    :ivar used: whether something was ever sent
    :ivar begun_at: time when the open transaction began, by the monotonic clock; infinite: none is open
    :ivar handed_over: number of messages in the transaction
    :ivar message_bytes: memory of a message, from those that were handed over lately
    """

    def __init__(self, producer: Producer, patience_s: float) -> None:
        self.producer = producer
        self.partitions = 0
        self.sent = 0
        self.used = False
        self.begun_at = math.inf
        self.handed_over = 0
        self.message_bytes = 1
        self._patience_s = patience_s
        self._proven = 0

    def begin(self) -> None:
        """Begin a transaction, unless one is open."""
        if math.isinf(self.begun_at):
            self.producer.begin_transaction()
            self.begun_at, self.used = time.monotonic(), True
            self.handed_over = 0

    def room(self) -> int:
        """Return how many messages may be handed over now.

        At most :data:`FIRST_BYTES` may wait for Kafka, and as many messages as it has taken in this transaction, or in
        an earlier short one. If so many wait already, this waits until Kafka has taken half of them.

        :raises KafkaException: Kafka takes nothing
        """
        if len(self.producer) >= self._most():
            self._wait_until(lambda: len(self.producer) <= self._most() // 2)
        return self._most() - len(self.producer)

    def _most(self) -> int:
        taken = self.handed_over - len(self.producer)
        return max(1, FIRST_BYTES // self.message_bytes) + max(taken, self._proven)

    def wait_for_half(self) -> None:
        """Wait until a full queue is half empty.

        :raises KafkaException: Kafka takes nothing
        """
        full = len(self.producer)
        self._wait_until(lambda: len(self.producer) <= full // 2)

    def commit(self) -> None:
        """Commit the open transaction, if there is one.

        :raises KafkaException: Kafka takes nothing, or refuses
        """
        if math.isinf(self.begun_at):
            return
        # In small steps, so that signals are heard; the rest takes the time of a few requests.
        self._wait_until(lambda: not serve(self.producer.flush, 1.0))
        self.producer.commit_transaction(self._patience_s)
        is_short = time.monotonic() - self.begun_at < COMMIT_AFTER_S
        self._proven = max(self._proven, self.handed_over) if is_short else 0
        self.begun_at = math.inf

    def _wait_until(self, done: Callable[[], bool]) -> None:
        least, since = len(self.producer), time.monotonic()
        while not done():
            serve(self.producer.poll, _POLL_S)
            if len(self.producer) < least:
                least, since = len(self.producer), time.monotonic()
            elif time.monotonic() - since > self._patience_s:
                reason = f"Kafka has taken nothing for {self._patience_s:.0f} s; {least:,} messages wait"
                raise KafkaException(KafkaError(KafkaError._MSG_TIMED_OUT, reason))

    def abort(self, seconds: float) -> None:
        """Abort the open transaction if the broker answers; else the next producer or the timeout aborts it."""
        if math.isinf(self.begun_at):
            return
        try:
            self.producer.abort_transaction(seconds)
        except KafkaException:
            self.producer.purge()

    def reason(self, error: KafkaError) -> KafkaError:
        """Return the cause of an error: after a failure only a commit, not a new message, tells which it was."""
        if error.code() not in (KafkaError._STATE, KafkaError._FATAL):
            return error
        try:
            self.producer.commit_transaction(_CAUSE_S)
        except KafkaException as cause:
            error = cause.args[0]
        return error


def serve(wait: Callable[[float], int], seconds: float) -> int:
    """Wait for librdkafka, which reports errors meanwhile.

    :raises KafkaException: the producer cannot be used any more
    """
    try:
        return wait(seconds)
    except SystemError as error:
        # The client has called our code while it was raising an exception.
        if isinstance(error.__cause__, KafkaException):
            raise error.__cause__ from None
        raise
