"""Tokens of messages, without decoding the messages: by them Kafka's partition is chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ringsync.avro import datum_kernels as kernels
from ringsync.compiled.memory import address

Steps = npt.NDArray[np.int64]
"""What is passed over on the way to the token, int64[count, 2] (:mod:`ringsync.avro.datum_kernels`)."""

_KINDS = {"long": kernels.LONG, "int": kernels.LONG, "string": kernels.TEXT, "boolean": kernels.BOOLEAN}


def steps_to_token(message: Any) -> Steps:
    """What stands before ``source.token`` in a value.

    :param message: the Avro schema of messages (:func:`ringsync.streams.messages.message_schema`)
    :raises ValueError: it has no token that can be found without decoding what is before it
    """
    try:
        (value,) = (field["type"] for field in message["fields"] if field["name"] == "value")
        before, source = _until("source", value["fields"])
        within, _ = _until("token", source["fields"])
        return np.array([_step(kind) for kind in (*before, *within)], np.int64).reshape(-1, 2)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"these messages have no source.token at a known place: {error}") from error


def tokens_of(data: bytes, bounds: npt.NDArray[np.int64], rows: int, steps: Steps) -> pa.Array:
    """The token of each message, int64.

    :param bounds: where each value begins and ends in ``data``: two numbers a message
    :raises ValueError: a value does not go on as the steps say
    """
    buffer, found = np.frombuffer(data, np.uint8), np.empty(rows, np.int64)
    bounds = np.ascontiguousarray(bounds[: 2 * rows])
    bad = kernels.read_longs(address(steps), len(steps), address(buffer), address(bounds), rows, address(found))
    if bad >= 0:
        raise ValueError(f"message {bad} of {rows} does not follow its Avro schema")
    return pa.array(found)


def partition_of(tokens: pa.Array, partitions: int) -> list[int]:
    """Kafka's partition for messages with these tokens: the token modulo the number of partitions, from 0.

    A token is a hash already, murmur3 of the partition key: it spreads partitions as well as another hash of it would.
    """
    found: list[int] = np.mod(tokens.to_numpy(), partitions).tolist()
    return found


def _until(name: str, fields: list[Any]) -> tuple[list[Any], Any]:
    """The types of the fields before the one with this name, and its own."""
    place = [field["name"] for field in fields].index(name)
    return [field["type"] for field in fields[:place]], fields[place]["type"]


def _step(kind: Any) -> tuple[int, int]:
    if isinstance(kind, list):
        null = kind.index("null")
        return _KINDS[kind[1 - null]], null
    return _KINDS[kind], -1
