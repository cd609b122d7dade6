"""A stream as files in the object store: the embedded form of a topic, for machines without Kafka.

======================================================  ====================================================
``streams/<topic>/schemas/key-<version>.avsc``          the key's schema, and ``value-<version>.avsc``
``streams/<topic>/<bucket>/<part>-<crc32c>.avro``       messages: Avro container of ``{key, value}``
``streams/<topic>/<bucket>/<part>-<crc32c>.index``      where its messages begin (:mod:`ringsync.streams.part_index`)
``streams/<topic>/<bucket>/manifest.json``              which parts make up the bucket; it is there or not
======================================================  ====================================================

A bucket is published by its manifest, once; what no manifest lists does not exist for a reader. A part's name ends
in the checksum of its bytes, so that a task that was thought dead and writes after all cannot replace what was
published. Buckets are read in the order of their names: whoever writes them names them so (e.g. by time, in UTC).

A manifest names files, ``<part>-<crc32c>.avro``; one of an earlier version, without ``.avro``, is read all the same.
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
from ringsync.cql.identifiers import portable_names
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
    """A stream did not do what was asked; the message names the object and the reason."""


class StreamConflictError(StreamError):
    """Something else was published under this name before."""


class StreamDamagedError(StreamError):
    """A published part is missing or not as it was published."""


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
    """One topic.

    :param topic: letters, digits, ``.``, ``_``, ``-``; at most 249 characters, as Kafka wants
    :raises ValueError: another topic name
    """

    def __init__(self, store: ObjectStore, topic: str) -> None:
        if not _TOPIC.fullmatch(topic):
            raise ValueError(f"topic {topic!r}: use 1 to 249 letters, digits, '.', '_' and '-', not '.' or '..'")
        self.store = store
        self.topic = topic
        self.root = f"streams/{topic}"

    def put_schemas(self, version: int, key: AvroRecord, value: AvroRecord) -> None:
        """Publish the schemas of a version; the same schemas again are fine.

        :raises StreamConflictError: the version has other schemas already
        """
        for kind, schema in (("key", key), ("value", value)):
            name, data = self._schema_key(kind, version), _json(schema)
            if not self._put_once(name, data):
                raise StreamConflictError(
                    f"{self.store.uri(name)} holds another schema: a changed schema needs a version of its own"
                )

    def put_next_schemas(self, key: AvroRecord, value: AvroRecord) -> int:
        """Publish schemas under the first version that has them, or none yet.

        :returns: the version, from 1
        """
        version = 1
        while True:
            try:
                self.put_schemas(version, key, value)
                return version
            except StreamConflictError:
                version += 1

    def schemas(self, version: int) -> tuple[AvroRecord, AvroRecord]:
        """The schemas of key and value of a version.

        :raises StreamError: no schemas were put for this version
        """
        return self._schema("key", version), self._schema("value", version)

    def open_part(self, bucket: str, part: str, schema_version: int, codec: Codec = "deflate") -> PartWriter:
        """Begin a file of messages.

        :param part: name that is different for each part of the bucket, e.g. of the task that writes it
        :raises StreamError: no schemas were put for this version
        :raises ValueError: a name that cannot be a file's
        """
        _check_name("bucket", bucket)
        _check_name("part", part)
        sync = hashlib.sha256(f"{self.root}/{bucket}/{part}".encode()).digest()[:16]
        schema = message_schema(*self.schemas(schema_version))
        container = ContainerWriter(schema, codec, sync, ROWS_PER_BLOCK)
        return PartWriter(self, bucket, part, container, PartIndex(schema_version))

    def publish(self, bucket: str, parts: Sequence[Part]) -> None:
        """Make a bucket of these parts, in this order, visible. The same again is fine.

        Files that other attempts left in the bucket are removed.

        :raises StreamConflictError: the bucket was published with other parts; names both
        :raises StreamDamagedError: a part is not there as it was written
        """
        self.check_parts(bucket, parts)
        manifest = {
            "topic": self.topic,
            "bucket": bucket,
            "records": sum(part.records for part in parts),
            "parts": [{**vars(part), "name": part.name + _SUFFIX, "crc32c": f"{part.crc32c:08x}"} for part in parts],
        }
        if not self._put_once(self._manifest_key(bucket), _json(manifest)):
            published = self.parts(bucket) or []
            if published != list(parts):
                raise StreamConflictError(
                    f"bucket {bucket!r} of {self.topic} was published with {_names(published)}; "
                    f"it cannot be published with {_names(parts)}"
                )
        listed = {key(bucket, part) for part in parts for key in (self._part_key, self._index_key)}
        for stat in self.store.list(f"{self.root}/{bucket}/"):
            if stat.key not in listed and stat.key.endswith((_SUFFIX, ".index")):
                self.store.delete(stat.key)

    def check_parts(self, bucket: str, parts: Sequence[Part]) -> None:
        """Look whether parts are in a bucket as they were written.

        :raises StreamDamagedError: one is not; names it
        """
        there = {stat.key: stat for stat in self.store.list(f"{self.root}/{_check_name('bucket', bucket)}/")}
        for part in parts:
            key = self._part_key(bucket, part)
            if (stat := there.get(key)) is None:
                raise StreamDamagedError(f"{self.store.uri(key)} is not there: write the part again")
            self._check_content(key, part, stat.size, stat.crc32c)

    def move(self, bucket: str, parts: Sequence[Part], to: FileStream) -> None:
        """Publish a bucket in another stream of the same messages, and remove it from this one. Again is fine.

        So are two at once: who is slower finds nothing left, and everything published.

        :raises StreamConflictError: the other stream has a bucket of this name with other parts
        :raises StreamDamagedError: a part is not there as it was written
        """
        if to.parts(bucket) is None:
            try:
                for part in parts:
                    index = self.store.get(self._index_key(bucket, part))
                    to.put_part(bucket, part, self._read_part(bucket, part), index)
                to.publish(bucket, parts)
            except (StreamDamagedError, NotFoundError):
                if to.parts(bucket) != list(parts):
                    raise
        elif (published := to.parts(bucket)) != list(parts):
            raise StreamConflictError(
                f"bucket {bucket!r} of {to.topic} was published with {_names(published or ())}; "
                f"{_names(parts)} of {self.topic} cannot be moved there"
            )
        for stat in self.store.list(f"{self.root}/{bucket}/"):
            self.store.delete(stat.key)

    def put_part(self, bucket: str, part: Part, data: bytes, index: bytes) -> None:
        """Write a part's file and its index; called by :meth:`PartWriter.finish`."""
        published = self.parts(bucket)
        if published is None:
            # The index first: whoever finds the part finds the index.
            self.store.put(self._index_key(bucket, part), index)
            self.store.put(self._part_key(bucket, part), data)
        elif part not in published:
            raise StreamConflictError(
                f"bucket {bucket!r} of {self.topic} is published already and does not list part {part.name}"
            )

    def remove_unpublished(self, bucket: str, part: str) -> None:
        """Remove the files of a part that no manifest lists, nor ever will.

        :param part: name that :meth:`open_part` was given
        """
        listed = {key(bucket, one) for one in self.parts(bucket) or () for key in (self._part_key, self._index_key)}
        for stat in self.store.list(f"{self.root}/{_check_name('bucket', bucket)}/{_check_name('part', part)}-"):
            if stat.key not in listed:
                self.store.delete(stat.key)

    def buckets(self, after: str = "") -> list[str]:
        """Published buckets, in the order in which they are to be read.

        :param after: only those behind this one; what lies before it is not listed
        """
        keys = (stat.key.split("/") for stat in self.store.list(f"{self.root}/", f"{self.root}/{after}"))
        return sorted(key[-2] for key in keys if len(key) == 4 and key[-1] == "manifest.json" and key[-2] > after)

    def parts(self, bucket: str) -> list[Part] | None:
        """The parts of a published bucket; None: it is not published."""
        key = self._manifest_key(bucket)
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

    def read(self, bucket: str) -> Iterator[dict[str, Any]]:
        """The messages of a published bucket, ``{"key": …, "value": …}``; numbers as written, no datetime.

        Each part is verified before its first message is given.

        :raises StreamError: the bucket is not published
        :raises StreamDamagedError: a part is missing or damaged; names it
        """
        parts = self.parts(bucket)
        if parts is None:
            raise StreamError(f"bucket {bucket!r} of {self.topic} is not published")
        for part in parts:
            yield from read_container(self._read_part(bucket, part))

    def blocks(self, bucket: str, part: Part) -> Iterator[MessageBlock]:
        """The messages of a part as they were encoded, some thousands at a time.

        They are cut out by the part's index. A part that was written before there were indexes is decoded, which
        takes some twenty times as long.

        :raises StreamDamagedError: part or index are damaged, or the part is missing
        """
        data, key = self._read_part(bucket, part), self._index_key(bucket, part)
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
            raise StreamDamagedError(f"{self.store.uri(key)}: {error}; remove it: it is not needed") from error

    def _read_part(self, bucket: str, part: Part) -> bytes:
        key = self._part_key(bucket, part)
        try:
            data = self.store.get(key)
        except (NotFoundError, ChecksumError) as error:
            raise StreamDamagedError(f"part {part.name} of the published bucket {bucket!r}: {error}") from error
        self._check_content(key, part, len(data), google_crc32c.value(data))
        return data

    def _check_content(self, key: str, part: Part, size: int, crc32c: int) -> None:
        if (size, crc32c) != (part.bytes, part.crc32c):
            raise StreamDamagedError(
                f"{self.store.uri(key)} is damaged: {size} bytes with CRC-32C {crc32c:08x}, "
                f"written were {part.bytes} with {part.crc32c:08x}"
            )

    def _put_once(self, key: str, data: bytes) -> bool:
        """Put an object that never changes; False: another content is there."""
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

    def _manifest_key(self, bucket: str) -> str:
        if bucket == _SCHEMAS:
            raise ValueError(f"bucket {bucket!r}: this folder is for the schemas, use another name")
        return f"{self.root}/{_check_name('bucket', bucket)}/manifest.json"

    def _part_key(self, bucket: str, part: Part) -> str:
        return f"{self._part_path(bucket, part)}{_SUFFIX}"

    def _index_key(self, bucket: str, part: Part) -> str:
        return f"{self._part_path(bucket, part)}.index"

    def _part_path(self, bucket: str, part: Part) -> str:
        return f"{self.root}/{_check_name('bucket', bucket)}/{_check_name('part', part.name)}"


class PartWriter:
    """One file of messages in the making (:meth:`FileStream.open_part`)."""

    def __init__(
        self, stream: FileStream, bucket: str, name: str, container: ContainerWriter, index: PartIndex
    ) -> None:
        self._stream = stream
        self._bucket = bucket
        self._name = name
        self._container = container
        self._index = index

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._container.size

    def add(self, messages: Messages) -> None:
        """Append messages, as :meth:`FileStream.put_schemas` of the part's schema version describes them."""
        # Each key followed by its value is one record of both.
        self._container.add(pc.binary_join_element_wise(messages.keys, messages.values, b""))
        self._index.add(messages)

    def finish(self) -> Part:
        """Put the file into the store; no reader sees it before :meth:`FileStream.publish` lists it.

        :raises StreamConflictError: the bucket is published already, without this very part
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
    """``<server>.<keyspace>.<table>``: the topic of a table's changes.

    Names that a topic cannot hold are made portable and get a digest of the name itself, so that two tables
    never share a topic.
    """
    return ".".join([server_name, _part(table.keyspace), _part(table.name)])


def bootstrap_topic(topic: str) -> str:
    """``bootstrap.<server>.<keyspace>.<table>``: where a table's changes wait while it is copied.

    :param topic: of the table's changes
    """
    return f"bootstrap.{topic}"


def _part(name: str) -> str:
    portable = portable_names([name])[0]
    return portable if portable == name else f"{portable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
