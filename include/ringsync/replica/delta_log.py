"""A Delta table's log: read what the table consists of, replace all of it or add to it in one commit.

Spark and delta-rs commit only what they themselves wrote or computed. A bootstrap's files are written by many
tasks, in several runs; they become the table at the end, without being read again, and only if nobody has committed in
between. So do the files of a pass of the sync. That takes one JSON object with the next version's name, put if absent:
the protocol of Delta itself
(https://github.com/delta-io/delta/blob/master/PROTOCOL.md, sections "Delta Log Entries", "Actions", "Checkpoints").
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import ringsync
from ringsync.storage.port import AlreadyExistsError, ObjectStore, Stat

Action = dict[str, Any]

_COMMIT = re.compile(r"_delta_log/(\d{20})\.json$")
_CHECKPOINT = re.compile(r"_delta_log/(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10}))?\.parquet$")
_READABLE_FEATURES = frozenset({"deletionVectors"})
_DELETION_VECTORS = "deletionVectors"


class DeltaLogError(Exception):
    """The log cannot be read or written; the message names the table and what to do."""


class ConcurrentCommitError(DeltaLogError):
    """Another writer committed this version first."""


@dataclass(frozen=True)
class DataFile:
    """A Parquet file of row images in the table's folder.

    :ivar name: relative to the table's folder
    :ivar bytes: the file's size
    :ivar min_token: least token inside, for readers that skip files
    :ivar written_at_ms: ms since the epoch
    """

    name: str
    rows: int
    bytes: int
    min_token: int
    max_token: int
    written_at_ms: int


@dataclass(frozen=True)
class DeltaSnapshot:
    """A table as of its newest version.

    :ivar version: -1: there is no table
    :ivar files: ``add`` actions of the live files
    :ivar transactions: version by application id
    """

    version: int = -1
    protocol: Action = field(default_factory=dict)
    metadata: Action = field(default_factory=dict)
    files: tuple[Action, ...] = ()
    transactions: Mapping[str, int] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows of all files, as far as these say; those marked deleted do not count."""
        return sum(map(file_rows, self.files)) - self.deleted_rows

    @property
    def bytes(self) -> int:
        """Of all files, compressed."""
        return sum(int(file["size"]) for file in self.files)

    @property
    def deleted_rows(self) -> int:
        """Rows that are still in the files but marked deleted."""
        return sum(int((file.get("deletionVector") or {}).get("cardinality", 0)) for file in self.files)


def file_rows(content: Action) -> int:
    """Rows in a file by its ``add`` action, those marked deleted included; 0 where it does not say."""
    return int(json.loads(content.get("stats") or "{}").get("numRecords", 0))


KnownSnapshots = dict[str, tuple[Sequence[Stat], DeltaSnapshot]]
"""By folder: the objects of the log, and what came out of them."""


def read_snapshot(store: ObjectStore, folder: str, known: KnownSnapshots | None = None) -> DeltaSnapshot:
    """Replay the log from its last checkpoint.

    :param folder: the table's key in the store
    :param known: cache: an unchanged log is not read again
    :raises DeltaLogError: commits are missing, or the table uses features that this reader does not know
    """
    known = {} if known is None else known
    log = list(store.list(f"{folder}/_delta_log/"))
    before, snapshot = known.get(folder, ([], DeltaSnapshot()))
    if log != before:
        snapshot = _replay(store, folder, [stat.key for stat in log])
        known[folder] = log, snapshot
    return snapshot


def _replay(store: ObjectStore, folder: str, keys: Sequence[str]) -> DeltaSnapshot:
    commits = {int(match[1]): key for key in keys if (match := _COMMIT.search(key))}
    start, checkpoint = _last_checkpoint(keys)
    version = max([start, *commits])
    missing = [number for number in range(start + 1, version + 1) if number not in commits]
    if missing:
        raise DeltaLogError(f"{store.uri(folder)}: the Delta log has no version {missing[0]}: restore it from a backup")
    live: dict[tuple[str, str], Action] = {}
    transactions: dict[str, int] = {}
    protocol: Action = {}
    metadata: Action = {}
    actions = [action for key in checkpoint for action in _checkpoint_actions(store.get(key))]
    for number in range(start + 1, version + 1):
        actions += [json.loads(line) for line in store.get(commits[number]).splitlines() if line.strip()]
    for action in actions:
        (kind, content), *_ = [(kind, content) for kind, content in action.items() if content is not None]
        match kind:
            case "add":
                live[_identity(content)] = content
            case "remove":
                live.pop(_identity(content), None)
            case "txn":
                transactions[content["appId"]] = content["version"]
            case "protocol":
                protocol = content
            case "metaData":
                metadata = content
    unknown = set(protocol.get("readerFeatures") or ()) - _READABLE_FEATURES
    if unknown:
        raise DeltaLogError(
            f"{store.uri(folder)} uses Delta features that ringsync never switches on ({', '.join(sorted(unknown))}): "
            "move the folder away, or drop these features with Delta's own tools"
        )
    return DeltaSnapshot(version, protocol, metadata, tuple(live.values()), transactions)


def replace_all(
    store: ObjectStore,
    folder: str,
    before: DeltaSnapshot,
    files: Sequence[DataFile],
    *,
    schema: str,
    properties: Mapping[str, str],
    transaction: str,
    now_ms: int,
    deletion_vectors: bool = True,
    also: Mapping[str, int] | None = None,
) -> int:
    """Make the table consist of these files and nothing else, in one commit; create it if it is not there.

    :param before: what the table was when it was decided to replace it
    :param schema: Spark's JSON form of the schema
    :param properties: table properties; those named ``delta.…`` must be what Delta knows
    :param transaction: application id: this table takes each only once
    :param also: further versions by application id, whatever they were before
    :param now_ms: ms since the epoch
    :param deletion_vectors: whether later writers may mark rows deleted instead of rewriting files
    :returns: the version, also if this transaction was committed before
    :raises ConcurrentCommitError: somebody has committed since ``before``
    """
    if transaction in before.transactions:
        return before.transactions[transaction]
    version = before.version + 1
    actions = [
        {"commitInfo": _commit_info("Overwrite", files, properties, before, now_ms)},
        {"protocol": _protocol(before.protocol, deletion_vectors)},
        {
            "metaData": {
                "id": before.metadata.get("id") or str(uuid.uuid4()),
                "format": {"provider": "parquet", "options": {}},
                "schemaString": schema,
                "partitionColumns": [],
                "configuration": dict(properties),
                "createdTime": before.metadata.get("createdTime") or now_ms,
            }
        },
        # The version of a transaction is that of the table, so that who comes again learns it.
        *_transactions({**(also or {}), transaction: version}, now_ms),
        *({"remove": _removal(content, now_ms)} for content in before.files),
        *({"add": _addition(file)} for file in files),
    ]
    return _commit(store, folder, version, actions)


def append(
    store: ObjectStore,
    folder: str,
    before: DeltaSnapshot,
    files: Sequence[DataFile],
    *,
    transactions: Mapping[str, int],
    now_ms: int,
    constants: Mapping[str, int] | None = None,
) -> int:
    """Add files to a table that is there, in one commit that has looked at nothing else in it.

    :param before: what the table was when it was decided to add these
    :param transactions: versions by application id
    :param now_ms: ms since the epoch
    :param constants: columns that have the same number in all rows, for readers that skip files
    :returns: the version
    :raises ConcurrentCommitError: somebody has committed since ``before``
    """
    actions = [
        {"commitInfo": _commit_info("Append", files, {}, before, now_ms)},
        *_transactions(transactions, now_ms),
        *({"add": _addition(file, constants)} for file in files),
    ]
    return _commit(store, folder, before.version + 1, actions)


def remove(store: ObjectStore, folder: str, before: DeltaSnapshot, files: Sequence[Action], *, now_ms: int) -> int:
    """Take files out of a table, in one commit.

    :param before: what the table was when it was decided to remove these
    :param files: the table's files
    :param now_ms: ms since the epoch
    :returns: the version
    :raises ConcurrentCommitError: somebody has committed since ``before``
    """
    info = {**_commit_info("Overwrite", [], {}, before, now_ms), "operation": "DELETE", "operationParameters": {}}
    actions = [{"commitInfo": info}, *({"remove": _removal(content, now_ms)} for content in files)]
    return _commit(store, folder, before.version + 1, actions)


def _commit(store: ObjectStore, folder: str, version: int, actions: Sequence[Action]) -> int:
    name = f"{folder}/_delta_log/{version:020}.json"
    try:
        store.put(name, b"".join(json.dumps(action).encode() + b"\n" for action in actions), if_absent=True)
    except AlreadyExistsError as error:
        raise ConcurrentCommitError(f"{store.uri(name)}: another writer has committed this version") from error
    return version


def _transactions(versions: Mapping[str, int], now_ms: int) -> Iterable[Action]:
    for application, version in versions.items():
        yield {"txn": {"appId": application, "version": version, "lastUpdated": now_ms}}


def _last_checkpoint(keys: Iterable[str]) -> tuple[int, list[str]]:
    """Version and objects of the newest whole checkpoint; -1 where there is none."""
    found: dict[tuple[int, int], list[str]] = {}
    for key in keys:
        if match := _CHECKPOINT.search(key):
            found.setdefault((int(match[1]), int(match[3] or 1)), []).append(key)
    whole = [(version, sorted(parts)) for (version, count), parts in found.items() if len(parts) == count]
    return max(whole, default=(-1, []))


def _checkpoint_actions(data: bytes) -> list[Action]:
    table = pq.read_table(pa.BufferReader(data))
    actions: list[Action] = []
    for kind in ("protocol", "metaData", "txn", "add"):
        if kind in table.column_names:
            there = table[kind].filter(pc.is_valid(table[kind]))
            actions += [{kind: _without_nulls(content)} for content in there.to_pylist()]
    return actions


def _without_nulls(content: Action) -> Action:
    """As the log's JSON would have it: no nulls, maps as objects, only what the protocol's JSON form knows."""
    return {
        name: dict(value) if name in ("configuration", "partitionValues", "tags", "options") else value
        for name, value in content.items()
        if value is not None and not name.endswith("_parsed")
    }


def _identity(content: Action) -> tuple[str, str]:
    """A file's identity: its path, and which deletion vector it has (PROTOCOL.md, "Add File and Remove File")."""
    vector = content.get("deletionVector")
    return content["path"], json.dumps(
        [vector.get(k) for k in ("storageType", "pathOrInlineDv", "offset")] if vector else None
    )


def _protocol(before: Action, deletion_vectors: bool) -> Action:
    """What readers and writers must know: nothing, or deletion vectors; what a table needs already stays."""
    reader, writer = set(before.get("readerFeatures") or ()), set(before.get("writerFeatures") or ())
    if not (deletion_vectors or reader or writer):
        return before or {"minReaderVersion": 1, "minWriterVersion": 2}
    if deletion_vectors:
        reader, writer = reader | {_DELETION_VECTORS}, writer | {_DELETION_VECTORS}
    # A table of an older protocol had these two by its version number alone.
    writer |= {"appendOnly", "invariants"}
    return {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": sorted(reader),
        "writerFeatures": sorted(writer),
    }


def _commit_info(
    mode: str, files: Sequence[DataFile], properties: Mapping[str, str], before: DeltaSnapshot, now_ms: int
) -> Action:
    own = {name.removeprefix("ringsync."): v for name, v in properties.items() if name.startswith("ringsync.")}
    return {
        "timestamp": now_ms,
        "operation": "WRITE",
        "operationParameters": {"mode": mode, "partitionBy": "[]"},
        "readVersion": before.version if before.version >= 0 else None,
        "isolationLevel": "Serializable",
        # Writers that have read the table may commit after a blind append as if it were not there.
        "isBlindAppend": mode == "Append",
        "operationMetrics": {
            "numFiles": str(len(files)),
            "numOutputRows": str(sum(file.rows for file in files)),
            "numOutputBytes": str(sum(file.bytes for file in files)),
        },
        "engineInfo": f"ringsync/{ringsync.__version__}",
        "userMetadata": json.dumps(own),
    }


def _addition(file: DataFile, constants: Mapping[str, int] | None = None) -> Action:
    same = dict(constants or {})
    stats = {
        "numRecords": file.rows,
        "minValues": {"token": file.min_token, **same},
        "maxValues": {"token": file.max_token, **same},
        "nullCount": {"token": 0, **dict.fromkeys(same, 0)},
        "tightBounds": True,
    }
    return {
        "path": file.name,
        "partitionValues": {},
        "size": file.bytes,
        "modificationTime": file.written_at_ms,
        "dataChange": True,
        "stats": json.dumps(stats),
    }


def _removal(content: Action, now_ms: int) -> Action:
    kept = {name: content[name] for name in ("path", "size", "partitionValues", "deletionVector") if content.get(name)}
    return {
        **kept,
        "deletionTimestamp": now_ms,
        "dataChange": True,
        "extendedFileMetadata": True,
        "partitionValues": content.get("partitionValues") or {},
    }
