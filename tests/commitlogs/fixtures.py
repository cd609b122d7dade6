"""The committed commit logs of real servers: where they are and how to get at their bytes.

`make.py` made them; see there for what is in each file.
"""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
MODES = {"4.0": ("4.0", 7), "4.1": ("4.1", 7), "5.0-v7": ("5.0", 7), "5.0-v8": ("5.0", 8)}
"""Mode: version of the server, version of its commit log."""
COMPRESSORS = {
    "plain": None,
    "lz4": "LZ4Compressor",
    "snappy": "SnappyCompressor",
    "deflate": "DeflateCompressor",
    "zstd": "ZstdCompressor",
    "jceks": None,
    "pkcs12": None,
}
"""Codec: what the segments name as their compressor; `jceks` and `pkcs12` are encrypted with the key in that store."""


@dataclass(frozen=True)
class Keystore:
    """
    A keystore with one secret AES key, made for these tests and of no use elsewhere.

    :param path: the file.
    :param store_type: `JCEKS` or `PKCS12`.
    :param store_password: of the keystore.
    :param key_alias: name of the key.
    :param key_password: of the key; Java gives a key in PKCS12 the password of the store.
    :param key_bits: length of the key.
    :param key_file: its bytes as hexadecimal text.
    """

    path: Path
    store_type: str
    store_password: str
    key_alias: str
    key_password: str
    key_bits: int
    key_file: Path


KEYSTORES = {
    "jceks": Keystore(
        DATA / "keystore.jceks", "JCEKS", "store-of-tests", "test:1", "key-of-tests", 128, DATA / "jceks.key.hex"
    ),
    "pkcs12": Keystore(
        DATA / "keystore.p12", "PKCS12", "store-of-tests", "test:2", "store-of-tests", 256, DATA / "pkcs12.key.hex"
    ),
}
"""By codec."""


@dataclass(frozen=True)
class Fixture:
    """
    One run of a server: what it was told, what it logged, what it answered.

    :param name: `<mode>-<codec>`, `-killed` behind it if the server was ended by SIGKILL.
    :param mode: a key of `MODES`.
    :param codec: a key of `COMPRESSORS`.
    :param killed: ended by SIGKILL, not by a clean stop.
    """

    name: str
    mode: str
    codec: str
    killed: bool

    @property
    def server_version(self) -> str:
        """`4.0`, `4.1` or `5.0`."""
        return MODES[self.mode][0]

    @property
    def log_version(self) -> int:
        """7 or 8, as in the names of the segments."""
        return MODES[self.mode][1]

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return DATA / self.name

    @property
    def keystore(self) -> Keystore | None:
        """The keystore that an encrypted log needs."""
        return KEYSTORES.get(self.codec)

    @property
    def schema(self) -> str:
        """The final schema as a snapshot has it: the `schema.cql` of each table, types included, not the keyspaces."""
        return (self.folder / "schema.cql").read_text()

    @property
    def described(self) -> str:
        """The final schema as `DESCRIBE KEYSPACE … WITH INTERNALS` prints it."""
        return (self.folder / "describe.cql").read_text()

    @property
    def dropped(self) -> str:
        """The tables that were dropped on the way, as DESCRIBE printed them just before."""
        return (self.folder / "dropped.cql").read_text()

    @property
    def statements(self) -> list[str]:
        """What was executed on the empty server, schema included; the rows of :attr:`selected` come from these."""
        return _lines(self.folder / "statements.cql")

    @property
    def beyond(self) -> list[str]:
        """What was executed after the last sync, just before SIGKILL: no idx covers it, `selected` lacks it."""
        return _lines(self.folder / "beyond.cql")

    @property
    def selected(self) -> dict[str, Any]:
        """
        What the server answered before its end: `{"moment": s, "keyspaces": {keyspace: {table: [row]}}}`.

        `capture.py` says what is in a row.
        """
        found: dict[str, Any] = json.loads(lzma.decompress((self.folder / "select.json.xz").read_bytes()))
        return found


def fixtures() -> list[Fixture]:
    """Return all committed fixtures, sorted by name."""
    return [fixture_named(folder.name) for folder in sorted(DATA.iterdir()) if folder.is_dir()]


def fixture_named(name: str) -> Fixture:
    """
    Return the fixture with a name, whether it is there or is to be made.

    :param name: as `Fixture.name`.
    :raises ValueError: it is no such name.
    """
    for mode in MODES:
        codec = name.removeprefix(f"{mode}-").removesuffix("-killed")
        if name.startswith(f"{mode}-") and codec in COMPRESSORS:
            return Fixture(name, mode, codec, name.endswith("-killed"))
    raise ValueError(f"{name!r} is no fixture: it would be one of {', '.join(MODES)}, a dash, a codec, maybe -killed")


def unpacked(fixture: Fixture, folder: Path) -> list[Path]:
    """
    Write the segments and their idx files as they were in `cdc_raw`.

    :param fixture: which.
    :param folder: where to; it must exist.
    :returns: the segments, oldest first.
    """
    for idx in fixture.folder.glob("*_cdc.idx"):
        (folder / idx.name).write_bytes(idx.read_bytes())
    segments = []
    for packed in sorted(fixture.folder.glob("*.log.xz")):
        segments.append(folder / packed.name.removesuffix(".xz"))
        segments[-1].write_bytes(lzma.decompress(packed.read_bytes()))
    return segments


def _lines(path: Path) -> list[str]:
    # not splitlines(): a literal may hold a line separator of Unicode
    return path.read_text().removesuffix("\n").split("\n") if path.exists() else []
