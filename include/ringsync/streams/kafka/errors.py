"""The errors of the relay from the file stream to Kafka."""

from __future__ import annotations


class RelayError(Exception):
    """Messages cannot be relayed: the message says who refuses what, and what to do."""


class BrokerUnavailableError(RelayError):
    """Kafka or the schema registry does not answer now. Nothing is lost: the next relay continues."""


class AnotherRelayError(RelayError):
    """Another process began later to relay the topic, too. Either process sends unconfirmed messages again."""


class CursorError(RelayError):
    """The cursor is damaged or belongs to another Kafka topic; the message names the object and what to do."""
