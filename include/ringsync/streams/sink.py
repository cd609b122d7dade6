"""A sink: where published messages are copied to, beside the file stream that is their outbox. Kafka is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ringsync.avro.mapping import AvroRecord
from ringsync.streams.part_index import MessageBlock

KAFKA = "kafka"
"""Name of the only sink so far."""


class RelayError(Exception):
    """Messages cannot be relayed: the message says who refuses what, and what to do."""


class BrokerUnavailableError(RelayError):
    """The sink, or a server that it needs, does not answer now. Nothing is lost: the next relay continues."""


class AnotherRelayError(RelayError):
    """Another process began later to relay the topic, too. Either process sends unconfirmed messages again."""


class CursorError(RelayError):
    """The cursor is damaged or belongs to another topic; the message names the object and what to do."""


class Sink(Protocol):
    """The topics of a messaging system, for one thread at a time.

    A message counts only after :meth:`confirm`. After an error, unconfirmed messages may be there or not; the next
    :meth:`open` begins anew. An open topic may have connections and threads until it is given up.

    :ivar name: name of the cursor's object: ``streams/<topic>/<name>.json``
    :ivar confirmed: number of messages confirmed so far
    :ivar waits_since: time when the wait for a server began, by the monotonic clock; infinite: no wait
    """

    name: str
    confirmed: int
    waits_since: float

    @property
    def queued_bytes(self) -> int:
        """Approximate memory of messages that the sink does not have yet; any thread may ask."""

    def check_answers(self, stop: Callable[[], bool]) -> None:
        """Make sure that the sink answers.

        :param stop: called about every second; True ends the wait
        :raises BrokerUnavailableError: no answer
        """

    def topic_of(self, stream: str) -> str:
        """Name the sink's topic of a file stream."""

    def open(self, topic: str) -> bool:
        """Make sure that the sink answers, the topic exists, and no process that opened it before can send to it.

        :returns: whether this process has not sent anything to the topic yet: only now the progress of others is known
        :raises BrokerUnavailableError: no answer
        :raises RelayError: the sink refuses
        """

    def is_open(self, topic: str) -> bool:
        """Tell whether messages can be sent and confirmed, which an error ends."""

    def send(self, topic: str, messages: MessageBlock, schemas: Callable[[int], tuple[AvroRecord, AvroRecord]]) -> None:
        """Hand messages over, in order, as fast as the sink takes them. The topic must be open.

        :param schemas: returns the schemas of key and value of a version
        :raises ValueError: the messages do not follow their schemas
        :raises BrokerUnavailableError: the sink takes nothing
        :raises AnotherRelayError: another process has opened the topic since
        :raises RelayError: the sink refused an earlier message
        """

    def is_long(self, topic: str) -> bool:
        """Tell whether messages were sent for so long that they should be confirmed now."""

    def confirm(self, topic: str) -> int:
        """Wait until the sink has all messages sent since the last call, and keeps them.

        :returns: number of these messages
        :raises BrokerUnavailableError: the sink takes nothing
        :raises AnotherRelayError: another process has opened the topic since
        :raises RelayError: the sink refused a message
        """

    def give_up(self, topic: str) -> None:
        """Take unconfirmed messages back; the next :meth:`open` begins anew."""

    def close(self) -> None:
        """Give up unconfirmed messages and all connections."""
