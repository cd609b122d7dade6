"""The files of failed tries to make a pass: a rival was faster, a task failed, or a process was killed.

A process that makes a pass writes its files first, then the pass, which names them. A number has only one pass
(:func:`ringsync.ledger.passes.put_pass`). Once it exists, files of this number that it does not name are garbage for
certain, regardless of clocks. Each run of a task has its own names (:func:`ringsync.steps.passes.make.own_name`), so
that files that a pass names are never written again. The file of changes is written first and removed last, so it leads
to all others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ringsync.ledger.passes import Pass, changes_key, deletions_key, pass_folder
from ringsync.storage.port import ObjectStore
from ringsync.streams.files import FileStream

_CHANGES = re.compile(r"/(\d{12})-([^/]+)\.arrow$")
_DIGESTS = re.compile(r"/(\d{12})-([^/]+)\.digests$")


@dataclass(frozen=True)
class Try:
    """The files that a task has made for a pass.

    :ivar name: name of the task's files
    """

    number: int
    name: str

    @staticmethod
    def of(changes: str) -> Try:
        """Return the try that has written a file of changes.

        :raises ValueError: this is the key of another file
        """
        match = _CHANGES.search(changes)
        if not match:
            raise ValueError(f"{changes!r} is not the key of a pass's changes")
        return Try(int(match[1]), match[2])


def list_tries(store: ObjectStore, table_id: str) -> list[Try]:
    """List all tries of a table that have files, tries that became passes included."""
    return [Try.of(stat.key) for stat in store.list(f"sync/{table_id}/changes/") if _CHANGES.search(stat.key)]


def lost_tries(tries: Collection[Try], passes: Mapping[int, Pass], last: int) -> frozenset[Try]:
    """Select the tries that no pass names or will name.

    :param tries: tries listed before the passes were read
    :param passes: all passes that have not been forgotten, by number
    :param last: number of the last pass; later tries may still become passes
    """
    named = {Try.of(key) for made in passes.values() for key in made.changes}
    return frozenset(made for made in tries if made.number <= last and made not in named)


def remove_tries(store: ObjectStore, table_id: str, topics: Collection[str], lost: Collection[Try]) -> None:
    """Remove the files of failed tries. Repeating it is safe.

    :param topics: topics that may hold their messages; files that a manifest lists stay
    """
    if not lost:
        return
    for stat in store.list(f"sync/{table_id}/published/"):
        match = _DIGESTS.search(stat.key)
        if match and Try(int(match[1]), match[2]) in lost:
            store.delete(stat.key)
    for failed in lost:
        store.delete(deletions_key(table_id, failed.number, failed.name))
        for topic in topics:
            FileStream(store, topic).remove_unpublished(pass_folder(failed.number), failed.name)
        store.delete(changes_key(table_id, failed.number, failed.name))
