"""Canonical keys: one spelling for all values that Cassandra takes for equal.

Cassandra compares clustering values, elements of sets and keys of maps by their type, not by their bytes. Decimals 1.0
and 1.00 are one row, alone or inside a tuple, and a replica stores the one that arrived first. Code that groups, finds
or names rows and elements by their keys must therefore compare canonical values:

* Decimals have no zeros at the end (100 is 1E+2), as in Java's ``BigDecimal.stripTrailingZeros``. Varints have no
  needless bytes. There is one true and one NaN. (0.0 and -0.0 are two values for Cassandra, too.)
* Tuples and user-defined types have no nulls at the end. The same holds inside frozen values.

Values of all other types, and bytes that are no value of their type, stay as they are. Partition keys are compared by
their bytes, because Cassandra hashes them. Two values have the same canonical form exactly if they have the same place
in the order by which rows are grouped (:mod:`ringsync.changes.keys.order`).
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
    """Tell whether one value of a type has several spellings. Values of all other types are canonical."""
    if isinstance(cql_type, Native):
        return NATIVES[cql_type.name].order in _ALIASED
    # Missing fields at the end equal null fields.
    return isinstance(cql_type, TupleType | UserType) or any(map(has_aliases, types_inside(cql_type)))


def canonical_cells(cells: Cells, cql_type: CqlType) -> Cells:
    """Return serialised values in their canonical form; null stays null.

    :param cells: values of clustering columns, elements of sets or keys of maps
    """
    if not has_aliases(cql_type):
        return cells
    program = type_program([cql_type])
    output, ends = np.empty(total_bytes(cells) + PADDING, np.uint8), np.empty(len(cells) + 1, np.int32)
    kernels.put_canonicals(*cells.arguments, address(program), 0, address(output), address(ends))
    return Cells(output, ends[:-1], np.diff(ends)).without(cells.lengths < 0)


def canonical_column(values: pa.Array, cql_type: CqlType) -> pa.Array:
    """Return typed values in their canonical form."""
    if not has_aliases(cql_type):
        return values
    return decode(cql_type, canonical_cells(cells_of(encode(cql_type, values)), cql_type)).values


def decoded_clustering(decoded: Decoded, cells: Cells, cql_type: CqlType) -> tuple[Decoded, Cells]:
    """Return a clustering column whose misfits have their canonical form, so that equal ones look equal everywhere.

    A varint with needless bytes becomes its number. Bytes that remain a misfit become canonical. Values keep their
    spelling.

    :param decoded: ``cells``, decoded
    """
    if decoded.misfits is None or not has_aliases(cql_type):
        return decoded, cells
    canonical = raw_values(canonical_cells(cells, cql_type))
    cells = cells_of(pc.if_else(pa.array(decoded.misfits), canonical, raw_values(cells)))
    return decode(cql_type, cells), cells
