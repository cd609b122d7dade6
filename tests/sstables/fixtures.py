"""The committed SSTables of real servers: where they are and how to get at their files.

`make.py` made them; see there for what is in each.
"""

from __future__ import annotations

import io
import json
import lzma
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
TAGS = ("flushed", "compacted")
"""Snapshots: as the memtables were flushed, which overlap; and after a compaction of each table to one SSTable."""


@dataclass(frozen=True)
class Fixture:
    """
    One run of a server: its snapshots, and what it answered.

    :param name: version of the server and of its SSTables.
    :param server_version: `4.0`, `4.1` or `5.0`.
    :param log_mode: what the server takes, as in `tests/commitlogs/statements.py`.
    :param compatibility: `storage_compatibility_mode` of 5.0.
    :param sstable_format: `big` or `bti`.
    :param uuid_ids: whether UUIDs name the SSTables.
    """

    name: str
    server_version: str
    log_mode: str
    compatibility: str = "CASSANDRA_4"
    sstable_format: str = "big"
    uuid_ids: bool = False

    @property
    def sstable_version(self) -> str:
        """`nb`, `oa` or `da`."""
        return self.name.rpartition("-")[2]

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return DATA / self.name

    @property
    def selected(self) -> dict[str, Any]:
        """
        What the server answered: `{"moment": s, "keyspaces": {keyspace: {table: [row]}}}`.

        `tests/commitlogs/capture.py` says what is in a row.
        """
        found: dict[str, Any] = json.loads(lzma.decompress((self.folder / "select.json.xz").read_bytes()))
        return found

    def unpacked(self, folder: Path) -> Path:
        """
        Write the files as they were in the server's data folder: `<keyspace>/<table>-<id>/snapshots/<tag>/…`.

        :param folder: where to; it must exist.
        :returns: the folder.
        """
        content = lzma.decompress((self.folder / "sstables.tar.xz").read_bytes())
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extractall(folder, filter="data")
        return folder


FIXTURES = {
    fixture.name: fixture
    for fixture in (
        Fixture("4.0-nb", "4.0", "4.0"),
        Fixture("4.1-nb", "4.1", "4.1", uuid_ids=True),
        Fixture("5.0-nb", "5.0", "5.0-v7"),
        Fixture("5.0-oa", "5.0", "5.0-v8", "NONE"),
        Fixture("5.0-da", "5.0", "5.0-v8", "NONE", "bti", True),
    )
}
