"""Why a replica cannot be read or written; the messages say what to do."""

from __future__ import annotations


class ReplicaMismatchError(Exception):
    """The replica's folder holds the replica of another table, or of another schema of this table."""


class SchemaChangedError(ReplicaMismatchError):
    """The replica has another version of the table's schema (:mod:`ringsync.replica.evolve`)."""


class ReplicaWaitsError(SchemaChangedError):
    """The replica takes no passes now, but will: the message says what it waits for, or who must do what."""
