"""The layout of the sync's state in the object store: ``state/layout.json``. Code refuses unknown layouts.

Layout 2 numbered the versions of each table id; they are taken over (:mod:`ringsync.ledger.table_versions`).
Layout 1 had a commit for each piece of a segment, and a file for each table and bucket, whose rows named columns by
their place. Once all these rows are published, only the positions in the logs are left; this version takes them over.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from contextlib import suppress

from ringsync.ledger.finished_segments import fold_finished
from ringsync.ledger.staging import StageCommit, node_of, put_commit
from ringsync.ledger.table_versions import take_over, take_over_followed
from ringsync.storage.port import AlreadyExistsError, ObjectStore, StorageError, VersionMismatchError

LAYOUT = 3
_KEY = "state/layout.json"
_OLD_COMMIT = re.compile(r"staging/log/[^/]+/\d{19}-\d{10}\.json")


class LayoutError(StorageError):
    """This version does not know the state's layout, or cannot take it over; nothing was changed."""


def check_layout(store: ObjectStore) -> None:
    """Check that this code knows the layout of the state, and take over the state of layout 1.

    :raises LayoutError: the layout is unknown, or rows of layout 1 still wait
    """
    while True:
        stat = store.stat(_KEY)
        layout = json.loads(store.get(_KEY))["layout"] if stat else 1
        if layout not in (1, 2):
            break
        if layout == 1:
            _take_over(store)
        take_over(store)
        # Plans of layout 1 do not name versions of tables; those of layout 2 name them by other numbers.
        for plan in store.list("plans/sync/"):
            store.delete(plan.key)
        ours = json.dumps({"layout": LAYOUT}).encode()
        with suppress(AlreadyExistsError, VersionMismatchError):
            store.put(_KEY, ours, if_version=stat.version) if stat else store.put(_KEY, ours, if_absent=True)
    if layout != LAYOUT:
        raise LayoutError(
            f"the state in {store.url} has layout {layout}, but this version of ringsync knows only {LAYOUT}: use the "
            "version that wrote it, or give this version its own store and bootstrap the tables there"
        )
    # Before the schema updater makes histories of other tables.
    take_over_followed(store)


def _take_over(store: ObjectStore) -> None:
    """Turn layout 1's positions in the nodes' logs into the first commit of each node."""
    keys = [stat.key for stat in store.list("staging/log/") if _OLD_COMMIT.fullmatch(stat.key)]
    documents = {key: json.loads(store.get(key)) for key in keys}
    waiting = sum(file["rows"] for commit in documents.values() for file in commit["files"] if file["bucket"])
    late = len(store.list("staging/late/")) if documents else 0
    if waiting or late:
        raise LayoutError(
            f"{waiting:,} rows and {late:,} files of late rows in {store.url}/staging were staged by an older version "
            "of ringsync, which did not record their columns: start that version once more, stop it when cdcservice "
            "status shows no open buckets and no late rows, then start this version"
        )
    ends: dict[str, dict[int, int]] = defaultdict(dict)
    finished: dict[str, set[int]] = defaultdict(set)
    for key, commit in documents.items():
        node, segment = node_of(key), int(commit["segment_id"])
        ends[node][segment] = max(ends[node].get(segment, 0), int(commit["end"]))
        if commit["finished"]:
            finished[node].add(segment)
    for node, known in ends.items():
        fold_finished(store, node, finished[node])
        left = {segment: end for segment, end in known.items() if segment not in finished[node]}
        put_commit(store, StageCommit(node, 1, int(time.time() * 1000), (), left, {}, {}, ()))
    for key in keys:
        store.delete(key)
