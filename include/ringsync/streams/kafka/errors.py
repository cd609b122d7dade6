"""What goes wrong between the file stream and Kafka."""

from __future__ import annotations


class RelayError(Exception):
    """Messages cannot be relayed: the message says who refuses what, and what to do."""


class BrokerUnavailableError(RelayError):
    """Kafka, or the schema registry, does not answer now. Nothing is lost: the next relay goes on."""


class AnotherRelayError(RelayError):
    """Another process relays the topic, too, and began later. What is not confirmed is sent again, by either."""


class CursorError(RelayError):
    """The cursor is damaged, or of another Kafka topic; the message names the object and what to do."""
