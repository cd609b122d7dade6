"""The log of a Delta table: read the table's files, replace all of them, or add some, each in one commit.

Spark and delta-rs commit only files that they themselves wrote. Many tasks in several runs write the files of a
bootstrap. These files become the table at the end, without being read again, and only if no other writer has committed
in between. The files of a sync's pass are added in the same way. A commit is one JSON object with the name of the next
version, put if absent, as Delta's protocol says
(https://github.com/delta-io/delta/blob/master/PROTOCOL.md, sections "Delta Log Entries", "Actions", "Checkpoints").
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import ringsync
from ringsync.replica.errors import ReplicaWaitsError
from ringsync.replica.features import (
    Action,
    is_on,
    refusal,
    with_deletion_vectors,
    with_metadata,
    with_row_ids,
    writer_features,
)
from ringsync.storage.port import AlreadyExistsError, NotFoundError, ObjectStore, Stat

_COMMIT = re.compile(r"_delta_log/(\d{20})\.json$")
_CHECKPOINT = re.compile(r"_delta_log/(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10}))?\.parquet$")
_FORMAT: Action = {"provider": "parquet", "options": {}}


class DeltaLogError(Exception):
    """The log cannot be read or written; the message names the table and what to do."""


class ConcurrentCommitError(DeltaLogError):
    """Another writer committed this version first."""


@dataclass(frozen=True)
class DataFile:
    """A Parquet file of row images in the table's folder.

    :ivar name: path relative to the table's folder
    :ivar min_token: least token in the file, for readers that skip files
    """

    name: str
    rows: int
    bytes: int
    min_token: int
    max_token: int
    written_at_ms: int


@dataclass(frozen=True)
class DeltaSnapshot:
    """A Delta table at its newest version.

    :ivar version: Delta version; -1: there is no table
    :ivar files: ``add`` actions of the live files. Those without statistics have about how many rows they hold
    :ivar transactions: version of each transaction by its application id
    :ivar updated_ms: when each transaction's files were written, ms since the epoch, if the log says it
    :ivar domains: configuration of each metadata domain
    """

    version: int = -1
    protocol: Action = field(default_factory=dict)
    metadata: Action = field(default_factory=dict)
    files: tuple[Action, ...] = ()
    transactions: Mapping[str, int] = field(default_factory=dict)
    updated_ms: Mapping[str, int] = field(default_factory=dict)
    domains: Mapping[str, str] = field(default_factory=dict)

    @property
    def configuration(self) -> dict[str, str]:
        """The table's properties."""
        return dict(self.metadata.get("configuration") or {})

    @property
    def rows(self) -> int:
        """Rows of all files, without the rows marked deleted."""
        return sum(map(file_rows, self.files)) - self.deleted_rows

    @property
    def bytes(self) -> int:
        """Compressed size of all files."""
        return sum(int(file["size"]) for file in self.files)

    @property
    def deleted_rows(self) -> int:
        """Rows that are still in the files but marked deleted."""
        return sum(int((file.get("deletionVector") or {}).get("cardinality", 0)) for file in self.files)


def file_rows(content: Action) -> int:
    """Read a file's number of rows from its ``add`` action, rows marked deleted included; 0 if it is not given."""
    return int(json.loads(content.get("stats") or "{}").get("numRecords", 0))


KnownSnapshots = dict[str, tuple[Sequence[Stat], DeltaSnapshot]]
"""The objects of the log and the snapshot read from them, by folder."""


def read_snapshot(
    store: ObjectStore, folder: str, known: KnownSnapshots | None = None, *, version: int | None = None
) -> DeltaSnapshot:
    """Read a table's snapshot: replay its log from the last checkpoint.

    :param folder: key of the table's folder in the store
    :param known: cache: an unchanged log is not read again
    :param version: Delta version; None: the newest one
    :raises DeltaLogError: commits are missing
    :raises ReplicaWaitsError: the table has features that ringsync does not honour
    """
    known = {} if known is None else known
    log = list(store.list(f"{folder}/_delta_log/"))
    if version is not None:
        log = [stat for stat in log if stat.key.rpartition("/")[2][:20] <= f"{version:020}"]
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
    updated_ms: dict[str, int] = {}
    protocol: Action = {}
    metadata: Action = {}
    domains: dict[str, str] = {}
    actions = [action for key in checkpoint for action in _checkpoint_actions(store.get(key))]
    for number in range(start + 1, version + 1):
        actions += [json.loads(line) for line in store.get(commits[number]).splitlines() if line.strip()]
    for action in actions:
        (kind, content), *_ = [(kind, content) for kind, content in action.items() if content is not None]
        match kind:
            case "add":
                live[file_identity(content)] = content
            case "remove":
                live.pop(file_identity(content), None)
            case "txn":
                transactions[content["appId"]] = content["version"]
                updated_ms[content["appId"]] = content.get("lastUpdated") or 0
            case "protocol":
                protocol = content
            case "metaData":
                metadata = content
            case "domainMetadata":
                domains[content["domain"]] = "" if content.get("removed") else content["configuration"]
    if reason := refusal(store.uri(folder), protocol, metadata, domains):
        raise ReplicaWaitsError(reason)
    files = tuple(_with_rows(store, folder, live.values()))
    return DeltaSnapshot(version, protocol, metadata, files, transactions, updated_ms, domains)


def _with_rows(store: ObjectStore, folder: str, files: Collection[Action]) -> Iterator[Action]:
    """Give files without statistics about the rows that they hold: as many for their size as the largest of them.

    Statistics are optional; a checkpoint drops them if its table's properties say so.
    """
    silent = {id(file): file for file in files if '"numRecords"' not in (file.get("stats") or "")}
    per_byte = 0.0
    if silent:
        largest = max(silent.values(), key=lambda file: int(file["size"]))
        # Who reads the rows of a file that is missing or damaged says so.
        with suppress(NotFoundError, ValueError, OSError, pa.ArrowException):
            per_byte = _rows_in(store, f"{folder}/{unquote(largest['path'])}", largest["size"]) / largest["size"]
    for file in files:
        if id(file) in silent:
            stats = json.loads(file.get("stats") or "{}")
            file = {**file, "stats": json.dumps({**stats, "numRecords": round(per_byte * file["size"])})}
        yield file


def _rows_in(store: ObjectStore, key: str, size: int) -> int:
    """Read a Parquet file's number of rows from its footer.

    :param size: size of the file, bytes
    """
    length = int.from_bytes(store.get_range(key, size - 8, 4), "little") + 8
    return int(pq.read_metadata(pa.BufferReader(store.get_range(key, size - length, length))).num_rows)


def log_from_checkpoint(store: ObjectStore, folder: str) -> list[str]:
    """List the keys of the newest complete checkpoint of a table's log, and of the commits from there on.

    :param folder: key of the table's folder in the store
    """
    keys = [stat.key for stat in store.list(f"{folder}/_delta_log/")]
    start, checkpoint = _last_checkpoint(keys)
    return checkpoint + [key for key in keys if (match := _COMMIT.search(key)) and int(match[1]) >= start]


def replace_all(
    store: ObjectStore,
    folder: str,
    before: DeltaSnapshot,
    files: Sequence[DataFile],
    *,
    schema: str,
    properties: Mapping[str, str],
    defaults: Mapping[str, str],
    transaction: str,
    now_ms: int,
    deletion_vectors: bool = True,
    also: Mapping[str, int] | None = None,
) -> int:
    """Replace all files of the table by these, in one commit; create the table if it is not there.

    What others have given the table stays: properties, features, its name, comments of columns.

    :param before: the table's snapshot when the caller decided to replace it
    :param schema: the table's schema as Spark's JSON
    :param properties: all properties ``ringsync.…``, which only ringsync sets
    :param defaults: properties that the table gets if it has no others of their names; Delta must know those named
        ``delta.…``
    :param transaction: application id of the transaction; the table takes each only once
    :param also: versions of further transactions by application id; they may be lower than before
    :param deletion_vectors: whether later writers may mark rows deleted instead of rewriting files
    :returns: the version that this transaction made, now or before
    :raises ConcurrentCommitError: another writer has committed since ``before``
    """
    if transaction in before.transactions:
        return before.transactions[transaction]
    version = before.version + 1
    kept = {name: value for name, value in before.configuration.items() if not name.startswith("ringsync.")}
    actions = [
        _commit_info("Overwrite", files, properties, before, now_ms),
        {"protocol": _protocol(before.protocol, deletion_vectors)},
        {
            "metaData": {
                "id": str(uuid.uuid4()),
                "createdTime": now_ms,
                **before.metadata,
                "format": _FORMAT,
                "schemaString": with_metadata(schema, before.metadata.get("schemaString", "")),
                "partitionColumns": [],
                "configuration": {**defaults, **kept, **properties},
            }
        },
        # The transaction's version is the table's, so that a repeated call can return it.
        *_transactions({**(also or {}), transaction: version}, now_ms),
        *({"remove": _removal(content, now_ms)} for content in before.files),
        *({"add": _addition(file)} for file in files),
    ]
    return _commit(store, folder, before, actions)


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
    """Add files to an existing table, in one blind commit: it depends on nothing that the table holds.

    :param before: the table's snapshot when the caller decided to add these files
    :param transactions: versions of transactions by application id
    :param constants: columns with the same number in all rows, for readers that skip files
    :returns: the new version
    :raises ConcurrentCommitError: another writer has committed since ``before``
    """
    actions = [
        _commit_info("Append", files, {}, before, now_ms),
        *_transactions(transactions, now_ms),
        *({"add": _addition(file, constants)} for file in files),
    ]
    return _commit(store, folder, before, actions)


def remove(store: ObjectStore, folder: str, before: DeltaSnapshot, files: Sequence[Action], *, now_ms: int) -> int:
    """Remove files from a table, in one commit.

    :param before: the table's snapshot when the caller decided to remove these files
    :param files: ``add`` actions of the files to remove
    :returns: the new version
    :raises ConcurrentCommitError: another writer has committed since ``before``
    """
    info = _commit_info("Overwrite", [], {}, before, now_ms, operation="DELETE")
    actions = [info, *({"remove": _removal(content, now_ms)} for content in files)]
    return _commit(store, folder, before, actions)


def set_schema(
    store: ObjectStore, folder: str, before: DeltaSnapshot, *, schema: str, properties: Mapping[str, str], now_ms: int
) -> int:
    """Give a table another schema and some properties, in one commit that leaves its files as they are.

    Readers show null for what a file lacks, and nothing of what the schema lacks.

    :param before: the table's snapshot when the caller decided this
    :param schema: the table's schema as Spark's JSON
    :param properties: properties to set; others stay
    :returns: the new version
    :raises ConcurrentCommitError: another writer has committed since ``before``
    """
    metadata = {
        **before.metadata,
        "format": _FORMAT,
        "schemaString": with_metadata(schema, before.metadata["schemaString"]),
        "configuration": {**before.configuration, **properties},
    }
    info = _commit_info("Overwrite", [], properties, before, now_ms, operation="REPLACE COLUMNS")
    return _commit(store, folder, before, [info, {"metaData": metadata}])


def _commit(store: ObjectStore, folder: str, before: DeltaSnapshot, actions: Sequence[Action]) -> int:
    """Put a commit behind a version.

    :param actions: ``commitInfo`` first
    :raises ConcurrentCommitError: another writer has put this commit
    """
    version, features = before.version + 1, writer_features(before.protocol)
    if "rowTracking" in features:
        actions = [*with_row_ids(actions, before.domains, version)]
    if is_on(before.configuration, "delta.enableInCommitTimestamps"):
        info = actions[0]["commitInfo"]
        info["inCommitTimestamp"] = max(info["timestamp"], _commit_time(store, folder, before.version) + 1)
    name = _commit_key(folder, version)
    try:
        store.put(name, b"".join(json.dumps(action).encode() + b"\n" for action in actions), if_absent=True)
    except AlreadyExistsError as error:
        raise ConcurrentCommitError(f"{store.uri(name)}: another writer has committed this version") from error
    return version


def _commit_time(store: ObjectStore, folder: str, version: int) -> int:
    """Read the time of a commit that has one in it, ms since the epoch; each commit's is later than the one before."""
    info = json.loads(store.get(_commit_key(folder, version)).partition(b"\n")[0]).get("commitInfo", {})
    return int(info.get("inCommitTimestamp", 0))


def _commit_key(folder: str, version: int) -> str:
    return f"{folder}/_delta_log/{version:020}.json"


def _transactions(versions: Mapping[str, int], now_ms: int) -> Iterable[Action]:
    for application, version in versions.items():
        yield {"txn": {"appId": application, "version": version, "lastUpdated": now_ms}}


def _last_checkpoint(keys: Iterable[str]) -> tuple[int, list[str]]:
    """Find the version and objects of the newest complete checkpoint; -1 if there is none."""
    parts_of: dict[tuple[int, int], list[str]] = {}
    for key in keys:
        if match := _CHECKPOINT.search(key):
            parts_of.setdefault((int(match[1]), int(match[3] or 1)), []).append(key)
    whole = [(version, sorted(parts)) for (version, count), parts in parts_of.items() if len(parts) == count]
    return max(whole, default=(-1, []))


def _checkpoint_actions(data: bytes) -> list[Action]:
    table = pq.read_table(pa.BufferReader(data))
    actions: list[Action] = []
    for kind in ("protocol", "metaData", "txn", "domainMetadata", "add"):
        if kind in table.column_names:
            there = table[kind].filter(pc.is_valid(table[kind]))
            actions += [{kind: _without_nulls(content)} for content in there.to_pylist()]
    return actions


def _without_nulls(content: Action) -> Action:
    """Give an action the form that it has in the log's JSON: no nulls, maps as objects, only the protocol's fields."""
    maps = ("configuration", "partitionValues", "tags", "options")
    plain = {
        name: dict(value) if name in maps and isinstance(value, list) else value
        for name, value in content.items()
        if value is not None and not name.endswith("_parsed")
    }
    if (parsed := content.get("stats_parsed")) and "stats" not in plain:  # delta.checkpoint.writeStatsAsJson is off
        plain["stats"] = json.dumps(parsed, default=str)
    return plain


def file_identity(content: Action) -> tuple[str, str]:
    """Return a file's identity: its path and its deletion vector (PROTOCOL.md, "Add File and Remove File")."""
    vector = content.get("deletionVector")
    return content["path"], json.dumps(
        [vector.get(k) for k in ("storageType", "pathOrInlineDv", "offset")] if vector else None
    )


def _protocol(before: Action, deletion_vectors: bool) -> Action:
    """Return the ``protocol`` action: all features that the table has already, and deletion vectors if wanted."""
    return (
        with_deletion_vectors(before) if deletion_vectors else before or {"minReaderVersion": 1, "minWriterVersion": 2}
    )


def _commit_info(
    mode: str,
    files: Sequence[DataFile],
    properties: Mapping[str, str],
    before: DeltaSnapshot,
    now_ms: int,
    operation: str = "WRITE",
) -> Action:
    ours = {name.removeprefix("ringsync."): v for name, v in properties.items() if name.startswith("ringsync.")}
    info = {
        "timestamp": now_ms,
        "operation": operation,
        "operationParameters": {"mode": mode, "partitionBy": "[]"} if operation == "WRITE" else {},
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
        "userMetadata": json.dumps(ours),
    }
    return {"commitInfo": info}


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
    names = ("path", "size", "deletionVector", "baseRowId", "defaultRowCommitVersion")
    return {
        **{name: content[name] for name in names if content.get(name) is not None},
        "deletionTimestamp": now_ms,
        "dataChange": True,
        "extendedFileMetadata": True,
        "partitionValues": content.get("partitionValues") or {},
    }
