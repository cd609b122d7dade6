"""What a running ScyllaDB says differently from Cassandra: whether it is one, and the cdc options of its tables."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ringsync.cluster.connection import ScyllaConnection

EXTENSION = "cdc"
"""Key of the cdc options in ``system_schema.tables.extensions``."""

DEFAULT_TTL_S = 86_400
"""Seconds for which ScyllaDB keeps the rows of a log, unless the table says otherwise."""

_INT = struct.Struct("<i")


class CdcOptionsError(ValueError):
    """The cdc options of a table are not as this version of ringsync knows them."""


@dataclass(frozen=True)
class CdcOptions:
    """The cdc options of a table of ScyllaDB.

    :ivar enabled: whether changes are written to the log. A log may exist without
    :ivar preimage: rows before the change in the log: none, the changed columns, or all columns
    :ivar postimage: whether the log has rows after the change
    :ivar delta: what the log has of the change itself: all of it, or only the keys
    :ivar ttl_s: seconds after which the rows of the log expire; 0: never
    """

    enabled: bool
    preimage: str = "false"
    postimage: bool = False
    delta: str = "full"
    ttl_s: int = DEFAULT_TTL_S


def is_scylla(asked: Any) -> bool:
    """Tell whether the cluster is a ScyllaDB.

    :param asked: a session of :func:`ringsync.cluster.session.connect`, or a node of it
    """
    session = getattr(asked, "session", asked)
    connection = getattr(getattr(session, "cluster", None), "connection_class", None)
    return isinstance(connection, type) and issubclass(connection, ScyllaConnection)


def cdc_options_of(extension: bytes) -> CdcOptions:
    """Decode the value of ``extensions['cdc']``: pairs of texts. All integers are int32, little endian.

    Keys that are not known are passed over: newer servers have further ones, and further values. ``delta`` is as the
    server says: only ``full`` can be followed.

    :raises CdcOptionsError: the bytes are no such pairs
    """
    found = _pairs(extension)
    ttl = found.get("ttl", str(DEFAULT_TTL_S))
    return CdcOptions(
        enabled=_truth(found, "enabled"),
        preimage=found.get("preimage", "false"),
        postimage=_truth(found, "postimage"),
        delta=found.get("delta", "full"),
        ttl_s=int(ttl) if ttl.isdecimal() else DEFAULT_TTL_S,
    )


def _truth(found: Mapping[str, str], key: str) -> bool:
    # A newer server may have further values: what is not off is on.
    return found.get(key, "false") != "false"


def _pairs(extension: bytes) -> dict[str, str]:
    at = _INT.size
    texts = []
    try:
        (count,) = _INT.unpack_from(extension)
        for _ in range(2 * count):
            (length,) = _INT.unpack_from(extension, at)
            at += _INT.size
            if length < 0 or at + length > len(extension):
                raise CdcOptionsError(f"a text of the cdc options has the length {length}: {extension.hex()}")
            texts.append(extension[at : at + length].decode())
            at += length
    except (struct.error, UnicodeDecodeError) as error:
        raise CdcOptionsError(f"the cdc options cannot be decoded ({error}): {extension.hex()}") from error
    if count < 0 or at != len(extension):
        raise CdcOptionsError(f"the cdc options have {len(extension) - at} bytes too many: {extension.hex()}")
    return dict(zip(texts[::2], texts[1::2], strict=True))


def options_in(row: Any) -> CdcOptions | None:
    """Return the cdc options in a row of ``system_schema.tables``; None: the table never had any.

    :param row: a row with ``extensions``
    :raises CdcOptionsError: as :func:`cdc_options_of`
    """
    extension = (row.extensions or {}).get(EXTENSION)
    return None if extension is None else cdc_options_of(bytes(extension))


def read_cdc_options(node: Any) -> Mapping[str, CdcOptions]:
    """Ask a node of ScyllaDB for the cdc options of all tables that have or had cdc, by table id (32 hex digits).

    The logs themselves have none.

    :param node: a node (:class:`ringsync.cluster.node.Node`), or a session
    :raises CdcOptionsError: as :func:`cdc_options_of`
    """
    rows = node.execute("SELECT id, extensions FROM system_schema.tables")
    found = {row.id.hex: options_in(row) for row in rows}
    return {table_id: options for table_id, options in found.items() if options is not None}


def cdc_column(asked: Any) -> str:
    """Name the column of ``system_schema.tables`` that tells of cdc, for a SELECT; :func:`has_cdc` reads it.

    :param asked: a session of :func:`ringsync.cluster.session.connect`, or a node of it
    """
    return "extensions" if is_scylla(asked) else "cdc"


def has_cdc(row: Any) -> bool:
    """Tell whether a table has cdc.

    :param row: a row of ``system_schema.tables`` with the column :func:`cdc_column`
    :raises CdcOptionsError: as :func:`cdc_options_of`
    """
    if hasattr(row, "cdc"):
        return bool(row.cdc)
    options = options_in(row)
    return options is not None and options.enabled
