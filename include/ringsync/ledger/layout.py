"""Which layout the sync's state in the object store has: ``state/layout.json``. Code refuses what it does not know.

Layout 1 had a commit for each piece of a segment, and a file for each table and bucket, whose rows named columns by
their place. Once all of these rows are published, what is left says only how far logs are read; that is taken over.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict

from ringsync.ledger.finished_segments import fold_finished
from ringsync.ledger.staging import StageCommit, node_of, put_commit
from ringsync.storage.port import AlreadyExistsError, NotFoundError, ObjectStore, StorageError

LAYOUT = 2
_KEY = "state/layout.json"
_OLD_COMMIT = re.compile(r"staging/log/[^/]+/\d{19}-\d{10}\.json")


class LayoutError(StorageError):
    """The state has a layout that this version does not know, or cannot take over; nothing was touched."""


def check_layout(store: ObjectStore) -> None:
    """Look whether this code knows the layout of the state; take over that of the version before.

    :raises LayoutError: it does not, or rows of the layout before still wait
    """
    try:
        found = json.loads(store.get(_KEY))["layout"]
    except NotFoundError:
        _take_over(store)
        try:
            store.put(_KEY, json.dumps({"layout": LAYOUT}).encode(), if_absent=True)
        except AlreadyExistsError:
            check_layout(store)
        return
    if found != LAYOUT:
        raise LayoutError(
            f"the state in {store.url} has layout {found}, and this version of ringsync knows {LAYOUT} only: use the "
            "version that wrote it, or give this one a store of its own and bootstrap the tables there"
        )


def _take_over(store: ObjectStore) -> None:
    """Make what layout 1 knows of the nodes' logs the first commit of each node.

    :raises LayoutError: staged rows wait, and nobody can tell which columns they name
    """
    keys = [stat.key for stat in store.list("staging/log/") if _OLD_COMMIT.fullmatch(stat.key)]
    documents = {key: json.loads(store.get(key)) for key in keys}
    waiting = sum(file["rows"] for one in documents.values() for file in one["files"] if file["bucket"])
    late = len(store.list("staging/late/")) if documents else 0
    if waiting or late:
        raise LayoutError(
            f"{waiting:,} rows and {late:,} files of late rows in {store.url}/staging were staged by an older version "
            "of ringsync, which did not note to which columns they belong: start that version once more, stop it when "
            "cdcservice status shows no open buckets and no late rows, and start this one then"
        )
    ends: dict[str, dict[int, int]] = defaultdict(dict)
    finished: dict[str, set[int]] = defaultdict(set)
    for key, one in documents.items():
        node, segment = node_of(key), int(one["segment_id"])
        ends[node][segment] = max(ends[node].get(segment, 0), int(one["end"]))
        if one["finished"]:
            finished[node].add(segment)
    for node, known in ends.items():
        fold_finished(store, node, finished[node])
        left = {segment: end for segment, end in known.items() if segment not in finished[node]}
        put_commit(store, StageCommit(node, 1, int(time.time() * 1000), (), left, {}, {}, ()))
    # Plans of this layout do not tell versions of tables.
    for key in [*keys, *(stat.key for stat in store.list("plans/sync/"))]:
        store.delete(key)
