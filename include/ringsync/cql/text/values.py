"""Serialised values as text, one column at a time: the common part of JSON and CQL literals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.cql.cells import Cells
from ringsync.cql.codec.decode import decode
from ringsync.cql.codec.split import Parts, split
from ringsync.cql.text.natives import joined, replaced
from ringsync.cql.types import CqlType, CustomType, MapType, Native, UserType

NULL = "null"
_BLOB = Native("blob")


@dataclass(frozen=True)
class TextForm:
    """The notation of values in one language.

    :ivar native: writer of a native type's values: takes its name, the values, and their bytes
    :ivar misfit: writer of a value that the Arrow type cannot hold, such as an empty one; None: it has no text
    :ivar brackets: opening and closing bracket of a list, set, map, vector, tuple or UDT
    :ivar field: writer of the name of a UDT's field
    :ivar keys: conversion of the texts of values to those of a map's keys
    """

    native: Callable[[str, pa.Array, Cells], pa.Array]
    misfit: Callable[[CqlType, bytes], str | None]
    brackets: Callable[[CqlType], tuple[str, str]]
    field: Callable[[str], str]
    keys: Callable[[pa.Array], pa.Array] = lambda texts: texts


def value_texts(form: TextForm, cql_type: CqlType, cells: Cells) -> pa.Array:
    """Write each value: ``null`` if it is null, and Arrow's null if its bytes are no value of the type."""
    if isinstance(cql_type, CustomType):
        cql_type = _BLOB
    if isinstance(cql_type, Native):
        decoded = decode(cql_type, cells)
        texts, misfits = form.native(cql_type.name, decoded.values, cells), decoded.misfits
    else:
        parts = split(cql_type, cells)
        texts, misfits = _composite(form, cql_type, parts), parts.misfits
    nulls = cells.lengths < 0
    if nulls.any():
        texts = pc.if_else(pa.array(nulls), NULL, texts)
    if misfits is not None and misfits.any():
        rows = np.flatnonzero(misfits)
        texts = replaced(texts, rows, [form.misfit(cql_type, cells.value(row) or b"") for row in rows.tolist()])
    return texts


def _composite(form: TextForm, cql_type: CqlType, parts: Parts) -> pa.Array:
    texts = [value_texts(form, kind, part) for kind, part in zip(parts.types, parts.cells, strict=True)]
    opened, closed = form.brackets(cql_type)
    if parts.starts is None:
        names = [f"{form.field(name)}: " for name in cql_type.field_names] if isinstance(cql_type, UserType) else []
        pieces: list[pa.Array | str] = []
        for place, text in enumerate(texts):
            pieces += [(", " if place else "") + (names[place] if names else ""), text]
        return joined(opened, *pieces, closed)
    entries = texts[0]
    if isinstance(cql_type, MapType):
        entries = joined(form.keys(texts[0]), ": ", texts[1])
    limits = pa.Array.from_buffers(pa.int32(), len(parts.misfits) + 1, [None, parts.starts])
    return joined(opened, pc.binary_join(pa.ListArray.from_arrays(limits, entries), ", "), closed)
