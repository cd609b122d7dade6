"""Serialised values as text, a column at a time: the part that JSON and CQL literals have in common."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ringsync.cql.cells import Cells
from ringsync.cql.decode import decode
from ringsync.cql.native_texts import Texts
from ringsync.cql.split import split
from ringsync.cql.types import CqlType, CustomType, MapType, Native

NULL = "null"
_BLOB = Native("blob")


@dataclass(frozen=True)
class TextForm:
    """How a language writes values.

    :ivar native: the texts of a native type's values: its name, the values, and the same as bytes
    :ivar misfit: the text of a value that no Arrow type holds, an empty one for example; None: it has none
    :ivar sequence: of a list, set, vector, tuple or UDT with these texts of its parts
    :ivar mapping: of a map with these texts of keys and values
    """

    native: Callable[[str, pa.Array, Cells], Texts]
    misfit: Callable[[CqlType, bytes], str | None]
    sequence: Callable[[CqlType, Sequence[str]], str]
    mapping: Callable[[Sequence[str], Sequence[str]], str]


def value_texts(form: TextForm, cql_type: CqlType, cells: Cells) -> Texts:
    """The text of each value: ``null`` where it is null, None where its bytes are no value of the type."""
    if isinstance(cql_type, CustomType):
        cql_type = _BLOB
    if isinstance(cql_type, Native):
        decoded = decode(cql_type, cells)
        found = form.native(cql_type.name, decoded.values, cells)
        misfits = decoded.misfits
    else:
        parts = split(cql_type, cells)
        texts = [value_texts(form, kind, part) for kind, part in zip(parts.types, parts.cells, strict=True)]
        found = (
            _fields(form, cql_type, texts) if parts.starts is None else _elements(form, cql_type, texts, parts.starts)
        )
        misfits = parts.misfits if parts.misfits.any() else None
    for row in np.flatnonzero(cells.lengths < 0).tolist():
        found[row] = NULL
    if misfits is not None:
        for row in np.flatnonzero(misfits).tolist():
            found[row] = form.misfit(cql_type, cells.value(row) or b"")
    return found


def _fields(form: TextForm, cql_type: CqlType, texts: list[Texts]) -> Texts:
    write = form.sequence
    return [_whole(cql_type, fields, write) for fields in zip(*texts, strict=True)]


def _elements(form: TextForm, cql_type: CqlType, texts: list[Texts], starts: pa.Buffer) -> Texts:
    limits = np.frombuffer(starts, np.int32).tolist()
    ranges = itertools.pairwise(limits)
    if isinstance(cql_type, MapType):
        keys, values = texts
        return [_whole_map(keys[first:last], values[first:last], form.mapping) for first, last in ranges]
    write = form.sequence
    return [_whole(cql_type, texts[0][first:last], write) for first, last in ranges]


def _whole(
    cql_type: CqlType, parts: Sequence[str | None], write: Callable[[CqlType, Sequence[str]], str]
) -> str | None:
    whole = [part for part in parts if part is not None]
    return write(cql_type, whole) if len(whole) == len(parts) else None


def _whole_map(
    keys: Sequence[str | None], values: Sequence[str | None], write: Callable[[Sequence[str], Sequence[str]], str]
) -> str | None:
    whole = [(key, value) for key, value in zip(keys, values, strict=True) if key is not None and value is not None]
    return write([key for key, _ in whole], [value for _, value in whole]) if len(whole) == len(keys) else None
