"""Keys in the one spelling that stands for all that Cassandra takes for equal.

Cassandra compares clustering values, elements of sets and keys of maps by their type, not by their bytes: decimals 1.0
and 1.00 are one row, alone or inside a tuple, and which of the two a replica has stored depends on what arrived first.
So whoever groups, finds or names rows and elements by their keys compares canonical values:

* decimals without zeros at their end (100 is 1E+2), as Java's ``BigDecimal.stripTrailingZeros``; varints without
  needless bytes; one true; one NaN (0.0 and -0.0 are two values for Cassandra, too);
* of tuples and user-defined types no nulls at the end; all inside of frozen values likewise.

What is no value of its type, and every other type, is its bytes. Partition keys are told apart by their bytes, as
Cassandra does, which hashes them. Two values are one here exactly where their places in the order
(:mod:`ringsync.changes.keys.order`), by which the merge groups, are the same.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.keys import canonical_kernels as kernels
from ringsync.changes.keys.order import type_program
from ringsync.compiled.memory import PADDING, address
from ringsync.cql.cells import Cells, cells_of, raw_values
from ringsync.cql.codec.decode import Decoded, decode
from ringsync.cql.codec.encode import encode
from ringsync.cql.codec.split import total_bytes
from ringsync.cql.natives import BOOLEAN, DECIMAL, FLOAT, NATIVES, VARINT
from ringsync.cql.types import CqlType, Native, TupleType, UserType, types_inside

_ALIASED = (BOOLEAN, FLOAT, DECIMAL, VARINT)


def has_aliases(cql_type: CqlType) -> bool:
    """Whether one value of a type may be written in several ways. The values of all others are canonical."""
    if isinstance(cql_type, Native):
        return NATIVES[cql_type.name].order in _ALIASED
    # Fields that are missing at the end are null fields.
    return isinstance(cql_type, TupleType | UserType) or any(map(has_aliases, types_inside(cql_type)))


def canonical_cells(cells: Cells, cql_type: CqlType) -> Cells:
    """Serialised values in their canonical form; null stays null.

    :param cells: of clustering columns, elements of sets, keys of maps
    """
    if not has_aliases(cql_type):
        return cells
    program = type_program([cql_type])
    output, ends = np.empty(total_bytes(cells) + PADDING, np.uint8), np.empty(len(cells) + 1, np.int32)
    kernels.put_canonicals(*cells.arguments, address(program), 0, address(output), address(ends))
    return Cells(output, ends[:-1], np.diff(ends)).without(cells.lengths < 0)


def canonical_column(values: pa.Array, cql_type: CqlType) -> pa.Array:
    """Typed values in their canonical form."""
    if not has_aliases(cql_type):
        return values
    return decode(cql_type, canonical_cells(cells_of(encode(cql_type, values)), cql_type)).values


def decoded_clustering(decoded: Decoded, cells: Cells, cql_type: CqlType) -> tuple[Decoded, Cells]:
    """A clustering column in which misfits have their canonical form, so that equal ones look equal everywhere.

    A varint with needless bytes becomes its number; what is still a misfit has canonical bytes. Values keep their
    spelling.

    :param decoded: of ``cells``
    """
    if decoded.misfits is None or not has_aliases(cql_type):
        return decoded, cells
    canonical = raw_values(canonical_cells(cells, cql_type))
    cells = cells_of(pc.if_else(pa.array(decoded.misfits), canonical, raw_values(cells)))
    return decode(cql_type, cells), cells
