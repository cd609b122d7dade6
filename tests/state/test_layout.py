"""State of another layout is refused, with what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringsync.ledger.layout import LAYOUT, LayoutError, check_layout
from ringsync.storage.local import LocalStore


def test_an_empty_store_gets_the_present_layout(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    check_layout(store)
    check_layout(store)
    assert json.loads(store.get("state/layout.json")) == {"layout": LAYOUT}


def test_another_layout_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("state/layout.json", b'{"layout": 99}')
    with pytest.raises(LayoutError, match="has layout 99, but this version of ringsync knows only 1: use the version"):
        check_layout(store)
