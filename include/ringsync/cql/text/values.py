"""Serialised values as text, a column at a time: the part that JSON and CQL literals have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.cql.cells import Cells
from ringsync.cql.codec.decode import decode
from ringsync.cql.codec.split import Parts, split
from ringsync.cql.text.natives import replaced
from ringsync.cql.types import CqlType, CustomType, MapType, Native, UserType

NULL = "null"
_BLOB = Native("blob")


@dataclass(frozen=True)
class TextForm:
    """How a language writes values.

    :ivar native: writes a native type's values: its name, the values, and the same as bytes
    :ivar misfit: writes a value that no Arrow type holds, an empty one for example; None: it has no text
    :ivar brackets: what stands before and behind the parts of a list, set, map, vector, tuple or UDT
    :ivar field: the name of a UDT's field
    :ivar keys: turns the texts of values into those of a map's keys
    """

    native: Callable[[str, pa.Array, Cells], pa.Array]
    misfit: Callable[[CqlType, bytes], str | None]
    brackets: Callable[[CqlType], tuple[str, str]]
    field: Callable[[str], str]
    keys: Callable[[pa.Array], pa.Array]


def value_texts(form: TextForm, cql_type: CqlType, cells: Cells) -> pa.Array:
    """Write each value: ``null`` where it is null, and Arrow's null where its bytes are no value of the type."""
    if isinstance(cql_type, CustomType):
        cql_type = _BLOB
    if isinstance(cql_type, Native):
        decoded = decode(cql_type, cells)
        found, misfits = form.native(cql_type.name, decoded.values, cells), decoded.misfits
    else:
        parts = split(cql_type, cells)
        found, misfits = _composite(form, cql_type, parts), parts.misfits
    nulls = cells.lengths < 0
    if nulls.any():
        found = pc.if_else(pa.array(nulls), NULL, found)
    if misfits is not None and misfits.any():
        rows = np.flatnonzero(misfits)
        found = replaced(found, rows, [form.misfit(cql_type, cells.value(row) or b"") for row in rows.tolist()])
    return found


def _composite(form: TextForm, cql_type: CqlType, parts: Parts) -> pa.Array:
    texts = [value_texts(form, kind, part) for kind, part in zip(parts.types, parts.cells, strict=True)]
    opened, closed = form.brackets(cql_type)
    if parts.starts is None:
        names = [f"{form.field(name)}: " for name in cql_type.field_names] if isinstance(cql_type, UserType) else []
        pieces: list[pa.Array | str] = []
        for place, text in enumerate(texts):
            pieces += [(", " if place else "") + (names[place] if names else ""), text]
        return pc.binary_join_element_wise(opened, *pieces, closed, "")
    entries = texts[0]
    if isinstance(cql_type, MapType):
        entries = pc.binary_join_element_wise(form.keys(texts[0]), texts[1], ": ")
    limits = pa.Array.from_buffers(pa.int32(), len(parts.misfits) + 1, [None, parts.starts])
    return pc.binary_join_element_wise(
        opened, pc.binary_join(pa.ListArray.from_arrays(limits, entries), ", "), closed, ""
    )
