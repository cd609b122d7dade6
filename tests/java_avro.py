"""Avro's own Java implementation, as Spark brings it along: a second reader of what our encoder writes."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pyarrow as pa


class JavaAvro:
    """Parses schemas and decodes messages in Spark's Java process, without logical types."""

    def __init__(self, spark: Any) -> None:
        avro = spark._jvm.org.apache.avro
        self._parser, self._reader = avro.Schema.Parser, avro.generic.GenericDatumReader
        self._decoders = avro.io.DecoderFactory.get()
        self._compatibility = avro.SchemaCompatibility
        self._parsed: dict[str, Any] = {}

    def parse(self, schema: Any) -> Any:
        """Parse a schema; Java refuses names that are not allowed, and defaults that do not fit."""
        text = json.dumps(schema, sort_keys=True)
        if text not in self._parsed:
            self._parsed[text] = self._parser().parse(text)
        return self._parsed[text]

    def read(self, writer: Any, data: pa.Array, reader: Any = None) -> list[Any]:
        """Decode data, all of it, as JSON values: bytes are text of the characters 0 to 255.

        :param reader: schema that the reader knows; None: the writer's
        """
        datum_reader = self._reader(self.parse(writer), self.parse(writer if reader is None else reader))
        found = []
        for one in data.to_pylist():
            decoder = self._decoders.binaryDecoder(bytearray(one), None)
            found.append(json.loads(datum_reader.read(None, decoder).toString()))
            assert decoder.isEnd()
        return found

    def can_read(self, reader: Any, writer: Any) -> bool:
        """Whether data of the writer's schema can be read with the reader's, whatever they are."""
        checked = self._compatibility.checkReaderWriterCompatibility(self.parse(reader), self.parse(writer))
        return str(checked.getType()) == "COMPATIBLE"


def as_java_prints(value: Any) -> Any:
    """Return what fastavro has read in the form that :meth:`JavaAvro.read` has."""
    if isinstance(value, dict):
        return {name: as_java_prints(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [as_java_prints(inner) for inner in value]
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def same(mine: Any, its: Any) -> bool:
    """Compare what fastavro and Java have read. Java prints a float of 32 bits with fewer digits."""
    if isinstance(mine, dict) and isinstance(its, dict):
        return mine.keys() == its.keys() and all(same(mine[name], its[name]) for name in mine)
    if isinstance(mine, list) and isinstance(its, list):
        return len(mine) == len(its) and all(map(same, mine, its))
    if isinstance(mine, float) and isinstance(its, float):
        with np.errstate(over="ignore"):
            return mine == its or float(np.float32(its)) == mine
    return type(mine) is type(its) and bool(mine == its)
