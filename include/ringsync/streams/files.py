"""A stream as files in the object store: a topic for machines without Kafka.

======================================================  ====================================================
``streams/<topic>/schemas/key-<version>.avsc``          schema of the key; the value's is ``value-<version>.avsc``
``streams/<topic>/<folder>/<part>-<crc32c>.avro``       messages: Avro container of ``{key, value}``
``streams/<topic>/<folder>/<part>-<crc32c>.index``      lengths of its messages (:mod:`ringsync.streams.part_index`)
``streams/<topic>/<folder>/manifest.json``              list of the folder's parts
======================================================  ====================================================

A folder of the stream holds the messages that are published together, such as those of a pass. Its manifest publishes
it, once; readers ignore files that no manifest lists. A part's name ends in the checksum of its bytes, so that a task
that was thought dead cannot replace a published part. Readers take folders in the order of their names, so writers
choose names in this order.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import pyarrow.compute as pc

from ringsync.avro.container import Codec, ContainerWriter, read_container
from ringsync.avro.mapping import AvroRecord
from ringsync.cql.identifiers import portable_name
from ringsync.schema.table import TableSchema
from ringsync.storage.port import AlreadyExistsError, ChecksumError, NotFoundError, ObjectStore
from ringsync.streams.messages import Messages, message_schema
from ringsync.streams.part_index import MessageBlock, PartIndex, blocks_by_decoding, blocks_by_index

ROWS_PER_BLOCK = 2000
"""Messages in a block of a container file: about a megabyte before compression."""

_TOPIC = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,199}")
_SCHEMAS = "schemas"
_SUFFIX = ".avro"


class StreamError(Exception):
    """An operation on a stream failed; the message names the object and the reason."""


class StreamConflictError(StreamError):
    """Other content was published under this name before."""


class StreamDamagedError(StreamError):
    """A published part is missing or its content has changed."""


@dataclass(frozen=True)
class Part:
    """One file of messages.

    :ivar name: file name without ``.avro``
    :ivar records: number of messages
    :ivar bytes: size of the file
    :ivar crc32c: CRC-32C of the file
    """

    name: str
    records: int
    bytes: int
    crc32c: int


class FileStream:
    """A topic in the object store.

    :param topic: letters, digits, ``.``, ``_``, ``-``; at most 249 characters, as Kafka wants
    :raises ValueError: the topic name is not allowed
    """

    def __init__(self, store: ObjectStore, topic: str) -> None:
        if not _TOPIC.fullmatch(topic):
            raise ValueError(f"topic {topic!r}: use 1 to 249 letters, digits, '.', '_' and '-', not '.' or '..'")
        self.store = store
        self.topic = topic
        self.root = f"streams/{topic}"

    def put_schemas(self, version: int, key: AvroRecord, value: AvroRecord) -> None:
        """Publish the schemas of a version. Publishing the same schemas again is safe.

        :raises StreamConflictError: the version has other schemas already
        """
        for kind, schema in (("key", key), ("value", value)):
            name, data = self._schema_key(kind, version), _json(schema)
            if not self._put_once(name, data):
                raise StreamConflictError(
                    f"{self.store.uri(name)} holds another schema: publish a changed schema under a new version"
                )

    def schemas(self, version: int) -> tuple[AvroRecord, AvroRecord]:
        """Read the schemas of key and value of a version.

        :raises StreamError: no schemas were put for this version
        """
        return self._schema("key", version), self._schema("value", version)

    def open_part(self, folder: str, part: str, schema_version: int, codec: Codec = "deflate") -> PartWriter:
        """Begin a file of messages.

        :param part: unique name of the part in the folder, e.g. the task's
        :raises StreamError: no schemas were put for this version
        :raises ValueError: a name cannot be a file name
        """
        _check_name("folder", folder)
        _check_name("part", part)
        sync = hashlib.sha256(f"{self.root}/{folder}/{part}".encode()).digest()[:16]
        schema = message_schema(*self.schemas(schema_version))
        container = ContainerWriter(schema, codec, sync, ROWS_PER_BLOCK)
        return PartWriter(self, folder, part, container, PartIndex(schema_version))

    def publish(self, folder: str, parts: Sequence[Part]) -> None:
        """Publish a folder of these parts, in this order. Publishing the same parts again is safe.

        This removes files that other tries left in the folder.

        :raises StreamConflictError: the folder was published with other parts; the message names both
        :raises StreamDamagedError: a part is missing or has other content than was written
        """
        self.check_parts(folder, parts)
        manifest = {
            "topic": self.topic,
            "bucket": folder,
            "records": sum(part.records for part in parts),
            "parts": [{**vars(part), "name": part.name + _SUFFIX, "crc32c": f"{part.crc32c:08x}"} for part in parts],
        }
        if not self._put_once(self._manifest_key(folder), _json(manifest)):
            published = self.parts(folder) or []
            if published != list(parts):
                raise StreamConflictError(
                    f"folder {folder!r} of {self.topic} was published with {_names(published)}; "
                    f"it cannot be published with {_names(parts)}"
                )
        listed = {key(folder, part) for part in parts for key in (self._part_key, self._index_key)}
        for stat in self.store.list(f"{self.root}/{folder}/"):
            if stat.key not in listed and stat.key.endswith((_SUFFIX, ".index")):
                self.store.delete(stat.key)

    def check_parts(self, folder: str, parts: Sequence[Part]) -> None:
        """Check that parts are in a folder as they were written.

        :raises StreamDamagedError: a part is missing or has other content; the message names it
        """
        there = {stat.key: stat for stat in self.store.list(f"{self.root}/{_check_name('folder', folder)}/")}
        for part in parts:
            key = self._part_key(folder, part)
            if (stat := there.get(key)) is None:
                raise StreamDamagedError(f"{self.store.uri(key)} is not there: write the part again")
            self._check_content(key, part, stat.size, stat.crc32c)

    def move(self, folder: str, parts: Sequence[Part], to: FileStream) -> None:
        """Publish a folder in another stream of the same messages, and remove it from this one.

        Moving it again is safe. So are two moves at once: the slower one finds everything published.

        :raises StreamConflictError: the other stream has a folder of this name with other parts
        :raises StreamDamagedError: a part is missing or has other content than was written
        """
        if to.parts(folder) is None:
            try:
                for part in parts:
                    index = self.store.get(self._index_key(folder, part))
                    to.put_part(folder, part, self._read_part(folder, part), index)
                to.publish(folder, parts)
            except (StreamDamagedError, NotFoundError):
                if to.parts(folder) != list(parts):
                    raise
        elif (published := to.parts(folder)) != list(parts):
            raise StreamConflictError(
                f"folder {folder!r} of {to.topic} was published with {_names(published or ())}; "
                f"{_names(parts)} of {self.topic} cannot be moved there"
            )
        for stat in self.store.list(f"{self.root}/{folder}/"):
            self.store.delete(stat.key)

    def put_part(self, folder: str, part: Part, data: bytes, index: bytes) -> None:
        """Write a part's file and its index; called by :meth:`PartWriter.finish`."""
        published = self.parts(folder)
        if published is None:
            # The index first: a reader that finds the part then finds the index.
            self.store.put(self._index_key(folder, part), index)
            self.store.put(self._part_key(folder, part), data)
        elif part not in published:
            raise StreamConflictError(
                f"folder {folder!r} of {self.topic} is published already and does not list part {part.name}"
            )

    def remove_unpublished(self, folder: str, part: str) -> None:
        """Remove the files of a part that no manifest lists or will list.

        :param part: name that was given to :meth:`open_part`
        """
        parts = self.parts(folder) or ()
        listed = {key(folder, published) for published in parts for key in (self._part_key, self._index_key)}
        for stat in self.store.list(f"{self.root}/{_check_name('folder', folder)}/{_check_name('part', part)}-"):
            if stat.key not in listed:
                self.store.delete(stat.key)

    def folders(self, after: str = "") -> list[str]:
        """List the published folders in reading order.

        :param after: name of the folder after which the list begins
        """
        keys = (stat.key.split("/") for stat in self.store.list(f"{self.root}/", f"{self.root}/{after}"))
        return sorted(key[-2] for key in keys if len(key) == 4 and key[-1] == "manifest.json" and key[-2] > after)

    def parts(self, folder: str) -> list[Part] | None:
        """Read the parts of a published folder from its manifest; None: the folder is not published."""
        key = self._manifest_key(folder)
        try:
            manifest = json.loads(self.store.get(key))
            return [
                Part(**{**part, "name": part["name"].removesuffix(_SUFFIX), "crc32c": int(part["crc32c"], 16)})
                for part in manifest["parts"]
            ]
        except NotFoundError:
            return None
        except (ChecksumError, AttributeError, ValueError, KeyError, TypeError) as error:
            raise StreamDamagedError(f"{self.store.uri(key)} is not a manifest: {error}") from error

    def read(self, folder: str) -> Iterator[dict[str, Any]]:
        """Read the messages of a published folder, ``{"key": …, "value": …}``; times stay numbers.

        Each part is verified before its first message is returned.

        :raises StreamError: the folder is not published
        :raises StreamDamagedError: a part is missing or damaged; the message names it
        """
        parts = self.parts(folder)
        if parts is None:
            raise StreamError(f"folder {folder!r} of {self.topic} is not published")
        for part in parts:
            yield from read_container(self._read_part(folder, part))

    def blocks(self, folder: str, part: Part) -> Iterator[MessageBlock]:
        """Read the encoded messages of a part, some thousands at a time.

        The part's index says where each begins. A part without index, of an early version, must be decoded, which
        takes some twenty times as long.

        :raises StreamDamagedError: the part or its index is damaged, or the part is missing
        """
        data, key = self._read_part(folder, part), self._index_key(folder, part)
        try:
            index = self.store.get(key)
        except NotFoundError:
            yield from blocks_by_decoding(data)
            return
        except ChecksumError as error:
            raise StreamDamagedError(f"the index of part {part.name} is damaged, remove it: {error}") from error
        try:
            yield from blocks_by_index(data, part.crc32c, index)
        except ValueError as error:
            raise StreamDamagedError(
                f"{self.store.uri(key)}: {error}; remove it: the part can be read without it"
            ) from error

    def _read_part(self, folder: str, part: Part) -> bytes:
        key = self._part_key(folder, part)
        try:
            data = self.store.get(key)
        except (NotFoundError, ChecksumError) as error:
            raise StreamDamagedError(f"part {part.name} of the published folder {folder!r}: {error}") from error
        self._check_content(key, part, len(data), google_crc32c.value(data))
        return data

    def _check_content(self, key: str, part: Part, size: int, crc32c: int) -> None:
        if (size, crc32c) != (part.bytes, part.crc32c):
            raise StreamDamagedError(
                f"{self.store.uri(key)} is damaged: it has {size} bytes with CRC-32C {crc32c:08x}, "
                f"but {part.bytes} with {part.crc32c:08x} were written"
            )

    def _put_once(self, key: str, data: bytes) -> bool:
        """Put an object that never changes; False: it has other content already."""
        try:
            self.store.put(key, data, if_absent=True)
        except AlreadyExistsError:
            return self.store.get(key) == data
        return True

    def _schema(self, kind: str, version: int) -> AvroRecord:
        try:
            schema: AvroRecord = json.loads(self.store.get(self._schema_key(kind, version)))
        except NotFoundError as error:
            raise StreamError(f"{self.topic} has no {kind} schema of version {version}: put_schemas first") from error
        return schema

    def _schema_key(self, kind: str, version: int) -> str:
        return f"{self.root}/{_SCHEMAS}/{kind}-{version}.avsc"

    def _manifest_key(self, folder: str) -> str:
        if folder == _SCHEMAS:
            raise ValueError(f"folder {folder!r}: this name is reserved for the schemas, use another name")
        return f"{self.root}/{_check_name('folder', folder)}/manifest.json"

    def _part_key(self, folder: str, part: Part, suffix: str = _SUFFIX) -> str:
        return f"{self.root}/{_check_name('folder', folder)}/{_check_name('part', part.name)}{suffix}"

    def _index_key(self, folder: str, part: Part) -> str:
        return self._part_key(folder, part, ".index")


@dataclass(frozen=True)
class PartWriter:
    """A writer of one file of messages (:meth:`FileStream.open_part`)."""

    _stream: FileStream
    _bucket: str
    _name: str
    _container: ContainerWriter
    _index: PartIndex

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._container.size

    def add(self, messages: Messages) -> None:
        """Append messages that follow the part's schema version (:meth:`FileStream.put_schemas`)."""
        # A key followed by its value is one record of both in Avro.
        self._container.add(pc.binary_join_element_wise(messages.keys, messages.values, b""))
        self._index.add(messages)

    def finish(self) -> Part:
        """Put the file into the store; readers see it once :meth:`FileStream.publish` lists it.

        :raises StreamConflictError: the folder is published already, without this very part
        """
        data = self._container.finish()
        crc32c = google_crc32c.value(data)
        written = Part(f"{self._name}-{crc32c:08x}", self._container.rows, len(data), crc32c)
        self._stream.put_part(self._bucket, written, data, self._index.finish(crc32c))
        return written


def _check_name(what: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{what} name {name!r}: use 1 to 200 letters, digits, '.', '_', '=' and '-', first a letter or digit"
        )
    return name


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=1, ensure_ascii=False).encode()


def _names(parts: Sequence[Part]) -> str:
    return f"{len(parts)} parts ({', '.join(part.name for part in parts) or 'none'})"


def data_topic(server_name: str, table: TableSchema) -> str:
    """Name the topic of a table's changes, ``<server>.<keyspace>.<table>``.

    A name that a topic cannot hold is made portable and gets a digest of the original name.
    """
    return f"{server_name}.{portable_name(table.keyspace, table.name)}"


def bootstrap_topic(topic: str) -> str:
    """Name the topic where a table's changes wait during its bootstrap, ``bootstrap.<server>.<keyspace>.<table>``.

    :param topic: topic of the table's changes
    """
    return f"bootstrap.{topic}"
