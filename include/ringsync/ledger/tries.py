"""Files of tries to make a pass that came to nothing: a rival was faster, a task failed, a process was killed.

Whoever makes a pass writes its files first, and then the pass, which names them. Once a pass of this number has been
made no other can be (:func:`ringsync.ledger.passes.put_pass`): what it does not name is garbage for certain, whatever
a clock says. Each run of a task has names of its own (:func:`ringsync.steps.passes.make.own_name`), so that what a
pass names is never written again. The file of changes is written first and removed last, and so tells of all others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ringsync.ledger.passes import Pass, changes_key, deletions_key, pass_bucket
from ringsync.storage.port import ObjectStore
from ringsync.streams.files import FileStream

_CHANGES = re.compile(r"/(\d{12})-([^/]+)\.arrow$")
_DIGESTS = re.compile(r"/(\d{12})-([^/]+)\.digests$")


@dataclass(frozen=True)
class Try:
    """What a task has made for a pass.

    :ivar number: of the pass
    :ivar name: of the task's files
    """

    number: int
    name: str

    @staticmethod
    def of(changes: str) -> Try:
        """The one that has written a file of changes.

        :param changes: its key
        :raises ValueError: it is the key of something else
        """
        found = _CHANGES.search(changes)
        if not found:
            raise ValueError(f"{changes!r} is not the key of a pass's changes")
        return Try(int(found[1]), found[2])


def list_tries(store: ObjectStore, table_id: str) -> list[Try]:
    """All tries of a table of which there are files, also those that have become passes."""
    return [Try.of(stat.key) for stat in store.list(f"sync/{table_id}/changes/") if _CHANGES.search(stat.key)]


def lost_tries(tries: Collection[Try], passes: Mapping[int, Pass], last: int) -> frozenset[Try]:
    """Those that no pass names, nor ever will.

    :param tries: as they were before the passes were read
    :param passes: all that have not been forgotten, by number
    :param last: the number of a pass: what is behind it may yet become one
    """
    named = {Try.of(key) for one in passes.values() for key in one.changes}
    return frozenset(one for one in tries if one.number <= last and one not in named)


def remove_tries(store: ObjectStore, table_id: str, topics: Collection[str], lost: Collection[Try]) -> None:
    """Remove the files of tries that came to nothing. Again is fine.

    :param topics: where their messages may be; what a manifest lists there stays
    """
    if not lost:
        return
    for stat in store.list(f"sync/{table_id}/published/"):
        found = _DIGESTS.search(stat.key)
        if found and Try(int(found[1]), found[2]) in lost:
            store.delete(stat.key)
    for one in lost:
        store.delete(deletions_key(table_id, one.number, one.name))
        for topic in topics:
            FileStream(store, topic).remove_unpublished(pass_bucket(one.number), one.name)
        store.delete(changes_key(table_id, one.number, one.name))
