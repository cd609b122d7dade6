"""Values as CQL literals that give exactly the same bytes again.

A value without a literal, such as an empty int, becomes a call: ``blobAsInt(0x)``. So does a text of several lines.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.compiled.arrow import Integers, Mask, integers
from ringsync.cql.cells import Cells
from ringsync.cql.identifiers import printable
from ringsync.cql.natives import DATE_EPOCH, NATIVES
from ringsync.cql.text.natives import (
    FIRST_DAY,
    LAST_DAY,
    LAST_TIMESTAMP_MS,
    chosen,
    joined,
    native_texts,
    replaced,
)
from ringsync.cql.text.values import TextForm, value_texts
from ringsync.cql.types import CqlType, ListType, MapType, Native, SetType, TupleType, UserType, VectorType

_BREAKS = r"[\x00-\x1f\x7f\x{85}\x{2028}\x{2029}]"
"""Characters that some readers take for the end of a line. CQL has no escape for them."""
_NAN = {"float": (np.uint32, 0x7FC00000), "double": (np.uint64, 0x7FF8000000000000)}
"""The bits of NaN in Java. Other bits are NaN, too."""


def literals(cql_type: CqlType, cells: Cells) -> pa.Array:
    """Write each value as a literal of one line; null if it is null, or if its bytes are no value of the type."""
    return _without_nulls(value_texts(CQL, cql_type, cells), cells)


def message_literals(cql_type: CqlType, cells: Cells) -> pa.Array:
    """Write each value as messages do: a text outside collections keeps its line ends, a float has Arrow's digits."""
    if isinstance(cql_type, Native) and NATIVES[cql_type.name].text in ("string", "float"):
        return _without_nulls(value_texts(_MESSAGE, cql_type, cells), cells)
    return literals(cql_type, cells)


def _without_nulls(texts: pa.Array, cells: Cells) -> pa.Array:
    nulls = cells.lengths < 0
    return pc.if_else(pa.array(nulls), pa.scalar(None, pa.string()), texts) if nulls.any() else texts


def some_literal(cql_type: CqlType) -> str | None:
    """Return the literal of some value of this type; None: the type has no literals."""
    match cql_type:
        case Native(name):
            return NATIVES[name].literal
        case ListType() | SetType() | MapType():
            return "".join(_brackets(cql_type))
        case VectorType(element, dimension):
            parts = [some_literal(element)] * dimension
        case TupleType(types) | UserType(field_types=types):
            parts = [some_literal(part_type) for part_type in types]
        case _:
            return None
    if isinstance(cql_type, UserType):
        parts = [part and f"{printable(name)}: {part}" for name, part in zip(cql_type.field_names, parts, strict=True)]
    opened, closed = _brackets(cql_type)
    whole = [part for part in parts if part is not None]
    return opened + ", ".join(whole) + closed if len(whole) == len(parts) else None


def _native(name: str, values: pa.Array, cells: Cells) -> pa.Array:
    if NATIVES[name].is_text:
        broken = np.flatnonzero(chosen(pc.match_substring_regex(values, _BREAKS)))
        return _as_bytes(_quoted_texts(values), name, broken, cells)
    texts = native_texts(name, values)
    match name:
        case "date":
            days = integers(values)
            return _if_usual((days >= FIRST_DAY) & (days <= LAST_DAY), texts, days + DATE_EPOCH)
        case "timestamp":
            milliseconds = integers(values) // 1000
            return _if_usual((milliseconds >= 0) & (milliseconds <= LAST_TIMESTAMP_MS), texts, milliseconds)
        case "duration":
            return pc.if_else(pc.equal(texts, ""), "0s", texts)
        case "time":
            return joined("'", texts, "'")
        case "inet":
            mapped = np.flatnonzero(chosen(pc.starts_with(values, "::ffff:")))
            return _as_bytes(joined("'", texts, "'"), name, mapped, cells)
        case "float" | "double":
            kind, usual = _NAN[name]
            bits = np.frombuffer(values.buffers()[1], kind, len(values))
            odd = np.isnan(bits.view(f"f{bits.itemsize}")) & (bits != usual) & (cells.lengths > 0)
            return _as_bytes(texts, name, np.flatnonzero(odd), cells)
    return texts


def _message_native(name: str, values: pa.Array, cells: Cells) -> pa.Array:
    if NATIVES[name].is_text:
        return _quoted_texts(values)
    texts = values.cast(pa.string())  # the shortest digits that give the same number
    texts = pc.if_else(pc.equal(texts, "-0"), "-0.0", texts)
    return _as_bytes(texts, name, np.flatnonzero(chosen(pc.invert(pc.is_finite(values)))), cells)


def _quoted_texts(values: pa.Array) -> pa.Array:
    return joined("'", pc.replace_substring(values, "'", "''"), "'")


def _if_usual(usual: Mask, texts: pa.Array, numbers: Integers) -> pa.Array:
    """Put the texts of usual moments in quotes; unusual moments become their numbers."""
    quoted = joined("'", texts, "'")
    return quoted if usual.all() else pc.if_else(pa.array(usual), quoted, pa.array(numbers).cast(pa.string()))


def _as_bytes(texts: pa.Array, name: str, rows: npt.NDArray[np.intp], cells: Cells) -> pa.Array:
    """Replace the texts in these rows by calls of the function that takes the type's bytes."""
    if not len(rows):
        return texts
    return replaced(texts, rows, [_from_bytes(name, cells.value(row) or b"") for row in rows.tolist()])


def _from_bytes(name: str, raw: bytes) -> str:
    return f"blobAs{name.capitalize()}(0x{raw.hex()})"


def _misfit(cql_type: CqlType, raw: bytes) -> str | None:
    """Write a misfit as a call that takes its bytes; collections, tuples and UDTs have no such function."""
    return _from_bytes(cql_type.name, raw) if isinstance(cql_type, Native) else None


def _brackets(cql_type: CqlType) -> tuple[str, str]:
    match cql_type:
        case UserType() | SetType() | MapType():
            return "{", "}"
        case TupleType():
            return "(", ")"
    return "[", "]"


CQL = TextForm(_native, _misfit, _brackets, printable)
"""Values as CQL literals."""
_MESSAGE = TextForm(_message_native, _misfit, _brackets, printable)
