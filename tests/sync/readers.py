"""Consumers of a stream who know one version of its schemas, and no other."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import fastavro

from ringsync.avro.mapping import without_logical_types
from ringsync.images.schema import lake_names
from ringsync.schema.table import TableSchema
from ringsync.streams.files import FileStream
from tests.stream_model import Message


@dataclass(frozen=True)
class Schemas:
    """The schemas of keys and values of one version, as fastavro has them."""

    key: Any
    value: Any

    @classmethod
    def of(cls, stream: FileStream, version: int) -> Schemas:
        return cls(*(fastavro.parse_schema(without_logical_types(one)) for one in stream.schemas(version)))


def as_read(stream: FileStream, messages: Iterable[Message], reader: Schemas) -> Iterator[Message]:
    """Messages as somebody sees them who has only the reader's schemas; each is written with the schema it names."""
    writers: dict[int, Schemas] = {}
    for message in messages:
        version = message["value"]["source"]["schema_version"]
        writer = writers.setdefault(version, writers.get(version) or Schemas.of(stream, version))
        yield {
            "key": read(encoded(message["key"], writer.key), writer.key, reader.key),
            "value": read(encoded(message["value"], writer.value), writer.value, reader.value),
        }


def encoded(record: Any, schema: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, schema, record)
    return out.getvalue()


def read(data: bytes, writer: Any, reader: Any) -> Any:
    """Decode by Avro's schema resolution; nothing may be left over."""
    stream = io.BytesIO(data)
    found = fastavro.schemaless_reader(stream, writer, reader)
    assert stream.read() == b""
    return found


def without_dropped_values(message: Message, table: TableSchema, dropped_us: Mapping[str, int]) -> Message:
    """What a consumer of the newest version must do (docs/messages.md): forget what columns had before their DROP.

    :param dropped_us: when columns were dropped that are there again
    """
    value, names = message["value"], lake_names(table)
    after, cells = dict(value["after"] or {}), dict(value["cells"])
    for column in table.value_columns:
        name, cell = names[column.name], cells.get(names[column.name])
        if cell is None or column.name not in dropped_us:
            continue
        at = dropped_us[column.name]
        if not column.is_multicell:
            if cell["writetime"] is not None and cell["writetime"] <= at:
                cells[name] = after[name] = None
            continue
        elements = cell["elements"] or []
        living = [one for one in elements if one["writetime"] is not None]
        if living and after.get(name) is not None:
            pairs = zip(living, after[name], strict=True)
            after[name] = [item for one, item in pairs if one["writetime"] > at] or None
        kept = [one for one in elements if one["writetime"] is None or one["writetime"] > at]
        cells[name] = {**cell, "elements": kept}
    return {
        "key": message["key"],
        "value": {**value, "after": after if value["after"] is not None else None, "cells": cells},
    }
