"""Which tables a topic has had: one that is dropped and created again has another id, and its name's topic.

``streams/<topic>/tables/<number>.json`` names them in their order, numbered from 1, each put once: the table's id, and
the number behind which its passes come: that of the ``end`` of the one before, or a later bucket's. So the passes of
all of them are one series, and whatever follows the order of passes and buckets — readers, Kafka, cursors — goes on as
if it were one table. An id has its turn once: who reads the stream could not tell a return from repetitions.

Whoever begins the next one ends the one before first: with a pass of the kind ``end``, behind which there is none. The
new table's log begins with a pass ``start`` of that number, and what follows from it is that all of the old table
becomes visible (:func:`ringsync.steps.passes.follow_ups.publish_pass`). Each of these is put if absent, in this order,
and may be repeated after a kill between any two.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from uuid import UUID

from ringsync.ledger.passes import Pass, TableReplacedError, get_pass, pass_numbers, put_pass
from ringsync.storage.port import AlreadyExistsError, ObjectStore
from ringsync.streams.files import FileStream, bootstrap_topic

_BUCKET = re.compile(r"pass-(\d{12})")


@dataclass(frozen=True)
class TopicOwner:
    """A table that has a topic, or had it.

    :ivar table_id: 32 hexadecimal digits
    :ivar behind: the number behind which its passes come; 0: it is the topic's first table
    """

    table_id: str
    behind: int


def topic_owners(store: ObjectStore, topic: str) -> list[TopicOwner]:
    """The tables that a topic has had, in their order; the last one has it."""
    return [TopicOwner(**json.loads(store.get(stat.key))) for stat in store.list(_folder(topic))]


def take_topic(store: ObjectStore, topic: str, table_id: str, now_ms: int) -> None:
    """Make the topic this table's, if it is not, before its first pass is made. Again is fine.

    :param topic: of the table's changes
    :param now_ms: ms since the epoch
    :raises TableReplacedError: another table has the topic by now; an id does not get it a second time
    """
    while True:
        known = topic_owners(store, topic)
        own = next((one for one in known if one.table_id == table_id), None)
        if own is not None:
            break
        if known and _was_created_before(table_id, known[-1].table_id):
            break  # a node that has not heard of the newer one names it, or gave it an id while its clock was behind
        behind = _behind(store, topic, known, table_id, now_ms)
        try:
            data = json.dumps({"table_id": table_id, "behind": behind}).encode()
            store.put(f"{_folder(topic)}{len(known) + 1:06}.json", data, if_absent=True)
        except AlreadyExistsError:
            continue
    if own is None or own is not known[-1]:
        raise TableReplacedError(table_id)
    _start(store, own, now_ms)


def tables_before(store: ObjectStore, topic: str, table_id: str) -> list[str]:
    """The ids of the tables that had a topic before this one, the last one first."""
    ids = [one.table_id for one in topic_owners(store, topic)]
    return ids[: ids.index(table_id)][::-1]


def _start(store: ObjectStore, own: TopicOwner, now_ms: int) -> None:
    if own.behind and not pass_numbers(store, own.table_id):
        put_pass(store, Pass(own.behind, "start", own.table_id, now_ms))


def _end(store: ObjectStore, old: TopicOwner, now_ms: int) -> int:
    """See to it that nothing is published of a table any more.

    :returns: the number of the pass that says so
    """
    _start(store, old, now_ms)
    while True:
        numbers = pass_numbers(store, old.table_id)
        if numbers and get_pass(store, old.table_id, numbers[-1]).kind == "end":
            return numbers[-1]
        number = (numbers[-1] if numbers else 0) + 1
        if put_pass(store, Pass(number, "end", old.table_id, now_ms)):
            return number


def _behind(store: ObjectStore, topic: str, known: list[TopicOwner], table_id: str, now_ms: int) -> int:
    """Behind which pass a new table begins: the end of the one before, and all buckets of the topic. A version before
    did not say whose they are, and let those of several tables have the same numbers; there a table that has passes
    goes on with them."""
    if not known and pass_numbers(store, table_id):
        return 0
    end = _end(store, known[-1], now_ms) if known else 0
    buckets = [bucket for one in (topic, bootstrap_topic(topic)) for bucket in FileStream(store, one).buckets()]
    return max([end, *(int(found[1]) for bucket in buckets if (found := _BUCKET.fullmatch(bucket)))])


def _was_created_before(table_id: str, other: str) -> bool:
    """As far as ids tell: those that Cassandra gives are time-based."""
    one, two = UUID(table_id), UUID(other)
    return one.version == two.version == 1 and one.time < two.time


def _folder(topic: str) -> str:
    return f"streams/{topic}/tables/"
