"""Data directories without a server: a program that links and removes as nodetool makes a node do it.

The files are those that a real server wrote (tests/sstables). The tests with real nodes are in
``test_sstable_bootstrap.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

_PROGRAM = """
import json, os, shutil, sys
from pathlib import Path

directories, (command, *arguments) = [Path(one) for one in {directories!r}], sys.argv[1:]
if command == "info":
    print("ID                     : {host_id}\\nGossip active          : true")
    sys.exit()
with open({log!r}, "a") as log:
    print(command, file=log)
if command == "clearsnapshot":
    _, tag, _, keyspace = arguments
    for directory in directories:
        for folder in directory.glob(f"{{keyspace}}/*/snapshots/{{tag}}"):
            shutil.rmtree(folder)
else:
    _, tag, _, name = arguments
    keyspace, table = name.split(".")
    listed = []
    tables = [folder for one in directories for folder in sorted(one.glob(f"{{keyspace}}/{{table}}-*"))]
    for folder in tables:
        target = folder / "snapshots" / tag
        target.mkdir(parents=True)
        for file in folder.iterdir():
            if file.is_file():
                os.link(file, target / file.name)
                listed += [file.name] if file.name.endswith("-Data.db") else []
    first = tables[0] / "snapshots" / tag
    (first / "manifest.json").write_text(json.dumps({{"files": listed}}))
    (first / "schema.cql").write_text("")
"""


def nodetool(folder: Path, *directories: Path, host_id: str = "") -> tuple[str, ...]:
    """Return the command of a node with these data directories. ``calls`` in the folder gets a line for each call but
    of ``info``.

    :param host_id: what ``info`` prints
    """
    program = folder / f"nodetool{host_id}.py"
    text = _PROGRAM.format(
        directories=[str(directory) for directory in directories], log=str(folder / "calls"), host_id=host_id
    )
    program.write_text(text)
    return sys.executable, str(program)


def calls(folder: Path) -> list[str]:
    """Return the commands that were called."""
    path = folder / "calls"
    return path.read_text().split() if path.exists() else []
