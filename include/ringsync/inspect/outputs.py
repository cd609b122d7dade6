"""Outputs of change rows: lines of JSON or CQL, Arrow and Parquet files."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from ringsync.changes.columns import columns_of
from ringsync.changes.schema import CHANGE_ROWS
from ringsync.changes.text.json import json_lines
from ringsync.changes.text.replay import CqlStatements
from ringsync.images.values import repeating_columns
from ringsync.inspect.problems import Problems
from ringsync.inspect.tables import Tables

TABLES_KEY = b"ringsync.tables"
"""Metadata key of an Arrow or Parquet file: JSON of keyspace, table and column names by table id."""


class Output:
    """A target of change rows, in the order of the log. This one drops them: only counts are wanted."""

    def write(self, rows: pa.RecordBatch) -> None:
        """Write change rows."""

    def close(self) -> None:
        """Write the rest: there are no more rows."""


@dataclass
class JsonLines(Output):
    """One JSON object per change row (docs/inspect.md)."""

    file: BinaryIO
    tables: Tables
    problems: Problems
    raw: bool

    def write(self, rows: pa.RecordBatch) -> None:
        lines, malformed = json_lines(rows, self.tables.by_id, self.raw)
        self.file.write("".join([f"{line}\n" for line in lines]).encode())
        for (table, column), count in malformed.items():
            self.problems.imperfect(
                f"{rows['file'][0]}: {count} values of {table} {column} are no values of its type: null in the output, "
                "with their raw bytes; check that the schema is the one of that day"
            )

    def close(self) -> None:
        self.file.flush()


class CqlLines(Output):
    """The statements that make the changes (docs/inspect.md)."""

    def __init__(self, file: BinaryIO, tables: Tables, problems: Problems, remaining_ttl: bool) -> None:
        self._file = file
        self._problems = problems
        self._statements = CqlStatements(tables.by_id, time.time if remaining_ttl else None)

    def write(self, rows: pa.RecordBatch) -> None:
        self._file.write("".join([f"{line}\n" for line in self._statements.lines(rows)]).encode())

    def close(self) -> None:
        self._file.flush()
        if count := self._statements.omitted:
            self._problems.imperfect(
                f"{count:,} parts of changes cannot be expressed in CQL; comments in the output say which"
            )


class ArrowFile(Output):
    """Rows as they are in an Arrow IPC or Parquet file, with the names of tables and columns in the metadata.

    :param schema: schema of the rows; by default change rows
    :param are_values: whether the columns are those of a table, and nothing else
    """

    def __init__(
        self,
        file: BinaryIO,
        tables: Tables,
        parquet: bool,
        schema: pa.Schema = CHANGE_ROWS,
        *,
        are_values: bool = False,
    ) -> None:
        self._schema = schema.with_metadata({TABLES_KEY: _described(tables)})
        self._file, self._parquet, self._are_values = file, parquet, are_values
        self._writer: pq.ParquetWriter | pa.RecordBatchFileWriter | None = None

    def write(self, rows: pa.RecordBatch) -> None:
        self._opened(rows).write_batch(rows.replace_schema_metadata(self._schema.metadata))

    def close(self) -> None:
        self._opened(pa.RecordBatch.from_pylist([], self._schema)).close()

    def _opened(self, rows: pa.RecordBatch) -> pq.ParquetWriter | pa.RecordBatchFileWriter:
        """Open the file; its first rows say which columns get a dictionary."""
        if self._writer is None and self._parquet:
            dictionaries = repeating_columns(rows) if self._are_values else True
            self._writer = pq.ParquetWriter(self._file, self._schema, compression="zstd", use_dictionary=dictionaries)
        elif self._writer is None:
            self._writer = pa.ipc.new_file(self._file, self._schema)
        return self._writer


def _described(tables: Tables) -> bytes:
    described = {
        table_id: {
            "keyspace": table.keyspace,
            "table": table.name,
            "partition_key": {column.name: str(column.type) for column in table.partition_key},
            "clustering": {column.name: str(column.type) for column in table.clustering},
            "columns": {column.name: str(column.type) for column in columns_of(table)},
        }
        for table_id, table in tables.by_id.items()
        if table_id in tables.shown
    }
    return json.dumps(described, ensure_ascii=False).encode()
