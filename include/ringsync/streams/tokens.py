"""Tokens of messages, read without decoding the messages. They choose Kafka's partition."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ringsync.avro import datum_kernels as kernels
from ringsync.compiled.memory import address

Steps = npt.NDArray[np.int64]
"""Fields to skip before the token, int64[count, 2] (:mod:`ringsync.avro.datum_kernels`)."""

_KINDS = {"long": kernels.LONG, "int": kernels.LONG, "string": kernels.TEXT, "boolean": kernels.BOOLEAN}


def steps_to_token(message: Any) -> Steps:
    """List the fields to skip before ``source.token`` in a value.

    :param message: Avro schema of the messages (:func:`ringsync.streams.messages.message_schema`)
    :raises ValueError: the schema has no token, or fields before it that must be decoded to skip them
    """
    try:
        (value,) = (field["type"] for field in message["fields"] if field["name"] == "value")
        before, source = _until("source", value["fields"])
        within, _ = _until("token", source["fields"])
        return np.array([_step(kind) for kind in (*before, *within)], np.int64).reshape(-1, 2)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"these messages have no source.token at a known place: {error}") from error


def tokens_of(data: bytes, bounds: npt.NDArray[np.int64], rows: int, steps: Steps) -> pa.Array:
    """Read the token of each message, int64.

    :param bounds: begin and end of each value in ``data``: two numbers per message
    :raises ValueError: a value does not have the fields that the steps describe
    """
    buffer, tokens = np.frombuffer(data, np.uint8), np.empty(rows, np.int64)
    bounds = np.ascontiguousarray(bounds[: 2 * rows])
    bad = kernels.read_longs(address(steps), len(steps), address(buffer), address(bounds), rows, address(tokens))
    if bad >= 0:
        raise ValueError(f"message {bad} of {rows} does not follow its Avro schema")
    return pa.array(tokens)


def partition_of(tokens: pa.Array, partitions: int) -> list[int]:
    """Choose Kafka's partition for messages with these tokens: the token modulo the number of partitions, from 0.

    A token is a hash already (murmur3 of the partition key), so another hash of it would spread no better.
    """
    chosen: list[int] = np.mod(tokens.to_numpy(), partitions).tolist()
    return chosen


def _until(name: str, fields: list[Any]) -> tuple[list[Any], Any]:
    """Return the types of the fields before this field, and the field's own type."""
    place = [field["name"] for field in fields].index(name)
    return [field["type"] for field in fields[:place]], fields[place]["type"]


def _step(kind: Any) -> tuple[int, int]:
    if isinstance(kind, list):
        null = kind.index("null")
        return _KINDS[kind[1 - null]], null
    return _KINDS[kind], -1
