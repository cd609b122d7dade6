"""The look at the files of a table before its snapshot, while the node compacts them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.steps.bootstrap import node_snapshot
from ringsync.steps.bootstrap.node_snapshot import NodeSnapshotError


def test_a_file_that_a_compaction_removes_meanwhile_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        (tmp_path / f"nb-{number}-big-Data.db").write_bytes(bytes(100))
    monkeypatch.setattr(node_snapshot, "_table_folders", lambda *_: [tmp_path])
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=150))
    is_file, node, table = Path.is_file, SimpleNamespace(host=SimpleNamespace(endpoint="n")), Any

    def gone(path: Path) -> bool:
        there = is_file(path)
        if path.name.startswith("nb-1-"):
            path.unlink()
        return there

    with pytest.raises(NodeSnapshotError, match="make room"):
        node_snapshot._check_space(node, table, 1.0)
    monkeypatch.setattr(Path, "is_file", gone)
    with pytest.raises(NodeSnapshotError, match="make room"):
        node_snapshot._check_space(node, table, 1.0)
    node_snapshot._check_space(node, table, 0.7)
