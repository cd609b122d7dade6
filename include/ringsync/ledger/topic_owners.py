"""The tables that a topic has had. A table that is dropped and created again has a new id, but the same topic.

``streams/<topic>/tables/<number>.json`` lists the tables in order, numbered from 1, each put once. It has the table's
id and the number after which its passes begin: the number of the former table's ``end``, or of a later folder of the
stream. So the passes of all these tables are one series, and readers, Kafka and cursors continue as with one table. An
id gets the topic only once: a consumer could not distinguish messages after its return from repetitions.

A process that begins the next table first ends the one before with a pass of the kind ``end``, the table's last. The
new table's passes begin with ``start`` of the same number. Publishing it makes all of the old table visible
(:func:`ringsync.steps.passes.follow_ups.publish_pass`). All these objects are put if absent, in this order, and each
step may be repeated after a kill.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from uuid import UUID

from ringsync.ledger.passes import Pass, TableReplacedError, get_pass, pass_numbers, put_pass
from ringsync.storage.port import AlreadyExistsError, ObjectStore, list_named
from ringsync.streams.files import FileStream, bootstrap_topic

_FOLDER = re.compile(r"pass-(\d{12})")


@dataclass(frozen=True)
class TopicOwner:
    """A table that has or had a topic.

    :ivar table_id: 32 hexadecimal digits
    :ivar behind: number after which the table's passes begin; 0: it is the topic's first table
    """

    table_id: str
    behind: int


def topic_owners(store: ObjectStore, topic: str) -> list[TopicOwner]:
    """Read the tables that a topic has had, in order; the last one has it now."""
    owners = list_named(store, _folder(topic), r"\d{6,}\.json")
    return [TopicOwner(**json.loads(store.get(stat.key))) for stat in owners]


def take_topic(store: ObjectStore, topic: str, table_id: str, now_ms: int) -> None:
    """Give the topic to this table before its first pass, unless it has the topic already. Repeating it is safe.

    :raises TableReplacedError: a newer table has the topic; an id does not get it a second time
    """
    while True:
        known = topic_owners(store, topic)
        owner = next((known_owner for known_owner in known if known_owner.table_id == table_id), None)
        if owner is not None:
            break
        if known and _was_created_before(table_id, known[-1].table_id):
            break  # a node does not know the newer table yet, or gave this one an id while its clock was behind
        behind = _behind(store, topic, known, now_ms)
        try:
            data = json.dumps({"table_id": table_id, "behind": behind}).encode()
            store.put(f"{_folder(topic)}{len(known) + 1:06}.json", data, if_absent=True)
        except AlreadyExistsError:
            continue
    if owner is None or owner is not known[-1]:
        raise TableReplacedError(table_id)
    _start(store, owner, now_ms)


def tables_before(store: ObjectStore, topic: str, table_id: str) -> list[str]:
    """List the ids of the tables that had a topic before this one, the last one first."""
    ids = [owner.table_id for owner in topic_owners(store, topic)]
    return ids[: ids.index(table_id)][::-1]


def _start(store: ObjectStore, owner: TopicOwner, now_ms: int) -> None:
    if owner.behind and not pass_numbers(store, owner.table_id):
        put_pass(store, Pass(owner.behind, "start", owner.table_id, now_ms))


def _end(store: ObjectStore, old: TopicOwner, now_ms: int) -> int:
    """End a table, so that nothing more is published of it.

    :returns: number of the pass ``end``
    """
    _start(store, old, now_ms)
    while True:
        numbers = pass_numbers(store, old.table_id)
        if numbers and get_pass(store, old.table_id, numbers[-1]).kind == "end":
            return numbers[-1]
        number = (numbers[-1] if numbers else 0) + 1
        if put_pass(store, Pass(number, "end", old.table_id, now_ms)):
            return number


def _behind(store: ObjectStore, topic: str, known: list[TopicOwner], now_ms: int) -> int:
    """Find the number after which a new table's passes begin: the former table's end, or the topic's last folder."""
    end = _end(store, known[-1], now_ms) if known else 0
    topics = (topic, bootstrap_topic(topic))
    folders = [folder for name in topics for folder in FileStream(store, name).folders()]
    return max([end, *(int(match[1]) for folder in folders if (match := _FOLDER.fullmatch(folder)))])


def _was_created_before(table_id: str, other: str) -> bool:
    """Tell whether a table is older than another by their ids: Cassandra's ids are time-based."""
    first, second = UUID(table_id), UUID(other)
    return first.version == second.version == 1 and first.time < second.time


def _folder(topic: str) -> str:
    return f"streams/{topic}/tables/"
