"""What people may switch on in the Delta tables of a replica: which of it ringsync's commits honour, which they refuse.

A writer must know each feature that a table has, and do what it demands
(https://github.com/delta-io/delta/blob/master/PROTOCOL.md, "Table Features", "Row Tracking", "In-Commit Timestamps").
Much demands nothing of commits that only add and remove whole files, such as the change data feed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Action = dict[str, Any]

_OF_OLD_WRITERS = {
    "appendOnly": 2,
    "invariants": 2,
    "checkConstraints": 3,
    "changeDataFeed": 4,
    "generatedColumns": 4,
    "columnMapping": 5,
    "identityColumns": 6,
}
"""Features that a table has by its writer version alone, if this is less than 7."""

_HONOURED = {
    *_OF_OLD_WRITERS,
    *("allowColumnDefaults", "checkpointProtection", "clustering", "deletionVectors", "domainMetadata"),
    *("inCommitTimestamp", "materializePartitionColumns", "rowTracking"),
    # No column of a replica has these types.
    *("timestampNtz", "variantType", "variantType-preview"),
}

_REFUSED_PROPERTIES = {
    "delta.appendOnly": "false",
    "delta.columnMapping.mode": "none",
    # Then the number of the last pass would be forgotten.
    "delta.setTransactionRetentionDuration": "",
}
"""Properties that nobody may set to another value than this."""

_ROW_TRACKING = "delta.rowTracking"


def is_on(configuration: Mapping[str, str], name: str) -> bool:
    """Tell whether a property of a table is set to true. Delta keeps values as they were written: ``TRUE`` is on, too.

    :param configuration: the table's properties
    """
    return configuration.get(name, "").lower() == "true"


def writer_features(protocol: Action) -> set[str]:
    """Return the features that a writer must know."""
    if "writerFeatures" in protocol:
        return set(protocol["writerFeatures"])
    return {name for name, version in _OF_OLD_WRITERS.items() if version <= protocol.get("minWriterVersion", 0)}


def with_deletion_vectors(protocol: Action) -> Action:
    """Return the protocol of a table in which rows may be marked deleted, beside what it allows already."""
    readers = set(protocol.get("readerFeatures") or ())
    if protocol.get("minReaderVersion") == 2:
        readers |= {"columnMapping"}
    return {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": sorted({*readers, "deletionVectors"}),
        "writerFeatures": sorted({*writer_features(protocol), "appendOnly", "deletionVectors", "invariants"}),
    }


def refusal(uri: str, protocol: Action, metadata: Action, domains: Mapping[str, str]) -> str | None:
    """Tell what forbids ringsync to write to a table, and what to do; None: nothing.

    :param domains: configuration of each metadata domain
    """
    name = f"delta.`{uri}`"
    problems = dict(_problems(name, protocol, metadata, domains))
    if not problems:
        return None
    statements = "; ".join(dict.fromkeys(problems.values()))
    return (
        f"{uri}: ringsync cannot write to this table while it has {', '.join(problems)} (docs/replica.md); its passes "
        f"wait. Run in Spark: {statements}; if Delta refuses this: {restored(name)}"
    )


def _problems(name: str, protocol: Action, metadata: Action, domains: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Find what forbids to write, and the statement that removes it."""
    alter, properties = f"ALTER TABLE {name}", metadata.get("configuration") or {}
    for feature in sorted({*writer_features(protocol), *(protocol.get("readerFeatures") or ())} - _HONOURED):
        yield f"the feature {feature}", f"{alter} DROP FEATURE `{feature}`"
    for key, value in properties.items():
        if key in _REFUSED_PROPERTIES and value.lower() != _REFUSED_PROPERTIES[key]:
            new = _REFUSED_PROPERTIES[key]
            yield (
                f"the property {key}",
                f"{alter} SET TBLPROPERTIES ('{key}' = '{new}')" if new else f"{alter} UNSET TBLPROPERTIES ('{key}')",
            )
        elif key.startswith("delta.constraints."):
            constraint = key.removeprefix("delta.constraints.")
            yield (
                f"the constraint {constraint}, which the source need not keep",
                f"{alter} DROP CONSTRAINT `{constraint}`",
            )
    if any(column not in (["token"], ["_version"]) for column in clustering_columns(domains)):
        yield "clustering by other columns than token", f"{alter} CLUSTER BY NONE"


def clustering_columns(domains: Mapping[str, str]) -> list[list[str]]:
    """Return the columns by which a table is clustered, as paths of names; after ``CLUSTER BY NONE`` there are none."""
    found: list[list[str]] = json.loads(domains.get("delta.clustering") or "{}").get("clusteringColumns", [])
    return found


def restored(name: str) -> str:
    """Return the statements that take back what was done to a table, for messages."""
    return (
        "SET spark.databricks.delta.restore.protocolDowngradeAllowed = true; "
        f"RESTORE TABLE {name} TO VERSION AS OF <the version before it, see DESCRIBE HISTORY {name}>"
    )


def with_row_ids(actions: Sequence[Action], domains: Mapping[str, str], version: int) -> Iterator[Action]:
    """Give the rows of added files the ids that row tracking wants.

    :param domains: configuration of each metadata domain
    :param version: version of the commit
    """
    known = last = json.loads(domains.get(_ROW_TRACKING) or "{}").get("rowIdHighWaterMark", -1)
    for action in actions:
        if added := action.get("add"):
            first, last = last + 1, last + json.loads(added["stats"])["numRecords"]
            added = {**added, "baseRowId": first, "defaultRowCommitVersion": version}
            action = {"add": added}
        yield action
    if last > known:
        domain = {"domain": _ROW_TRACKING, "configuration": json.dumps({"rowIdHighWaterMark": last})}
        yield {"domainMetadata": {**domain, "removed": False}}


def columns_differ(theirs: str, ours: str) -> str | None:
    """Name the first column in which two schemas differ in more than its place and its metadata; None: there is none.

    :param theirs: schema as Spark's JSON
    :param ours: likewise
    """
    found, wanted = (
        {column["name"]: _without_metadata(column) for column in json.loads(schema).get("fields", [])}
        for schema in (theirs, ours)
    )
    names = itertools.chain(found, wanted)
    return next((name for name in names if found.get(name) != wanted.get(name)), None)


def _without_metadata(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: _without_metadata(value) for name, value in part.items() if name != "metadata"}
    return [_without_metadata(value) for value in part] if isinstance(part, list) else part


def with_metadata(new: str, old: str) -> str:
    """Return a schema whose columns, and fields inside, have the metadata (comments …) that another's have.

    :param new: schema as Spark's JSON
    :param old: schema as Spark's JSON; empty: there is none
    """
    return json.dumps(_with_metadata(json.loads(new), json.loads(old or "{}")))


def _with_metadata(new: Any, old: Any) -> Any:
    if not (isinstance(new, dict) and isinstance(old, dict)) or "fields" not in new:
        return new
    known = {field["name"]: field for field in old.get("fields", [])}
    return {**new, "fields": [_field_with_metadata(field, known.get(field["name"])) for field in new["fields"]]}


def _field_with_metadata(field: Action, old: Action | None) -> Action:
    if old is None:
        return field
    same_type = _without_metadata(old["type"]) == _without_metadata(field["type"])
    # What Delta computes or checks ("delta.…") is not for columns whose values come from the source.
    kept = {name: value for name, value in old["metadata"].items() if same_type and not name.startswith("delta.")}
    return {**field, "type": _with_metadata(field["type"], old["type"]), "metadata": {**kept, **field["metadata"]}}
