"""The layout of the sync's state in the object store: ``state/layout.json``. Code refuses unknown layouts."""

from __future__ import annotations

import json
from contextlib import suppress

from ringsync.storage.port import AlreadyExistsError, ObjectStore, StorageError

LAYOUT = 1
_KEY = "state/layout.json"


class LayoutError(StorageError):
    """This version does not know the state's layout; nothing was changed."""


def check_layout(store: ObjectStore) -> None:
    """Check that this code knows the layout of the state. A new store gets the present one.

    :raises LayoutError: the layout is unknown
    """
    with suppress(AlreadyExistsError):
        store.put(_KEY, json.dumps({"layout": LAYOUT}).encode(), if_absent=True)
    layout = json.loads(store.get(_KEY))["layout"]
    if layout != LAYOUT:
        raise LayoutError(
            f"the state in {store.url} has layout {layout}, but this version of ringsync knows only {LAYOUT}: use the "
            "version that wrote it, or give this version its own store and bootstrap the tables there"
        )
