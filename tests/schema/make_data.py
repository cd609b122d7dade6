"""Write what a server says about its tables into tests/schema/data: `python -m tests.schema.make_data 4.0 4.1 5.0`.

For each version: `<version>.cql`, what DESCRIBE KEYSPACE WITH INTERNALS prints; `<version>-snapshot.cql`, the
schema.cql files of a snapshot, one after another; `<version>.json`, the tables by `system_schema`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal, get_args
from unittest.mock import patch

from ringsync.cluster.schema import read_tables
from ringsync.schema.description import describe
from servers import cassandra
from servers.cassandra import CassandraNode, NodeSettings
from tests.schema.statements import EVERY_VERSION, VERSION_5, WITH_OPTIONS, WITH_OPTIONS_5, statements

DATA = Path(__file__).parent / "data"
CACHE = Path(__file__).parent.parent.parent / ".cache"
Version = Literal["4.0", "4.1", "5.0"]

OPTIONS: dict[str, dict[str, bool]] = {
    "4.0": {"enable_user_defined_functions": True, "enable_materialized_views": True},
    "4.1": {"user_defined_functions_enabled": True, "materialized_views_enabled": True},
    "5.0": {
        "user_defined_functions_enabled": True,
        "materialized_views_enabled": True,
        "dynamic_data_masking_enabled": True,
    },
}


def make(version: Version) -> None:
    """Start a node of this version, make the tables, and write the three files."""
    common = cassandra.common_configuration

    def configuration(folder: Path, settings: NodeSettings) -> dict[str, Any]:
        return common(folder, settings) | OPTIONS[version]

    settings = NodeSettings(version=version).on_free_ports()
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(cassandra, "common_configuration", configuration),
        CassandraNode(Path(folder), settings, CACHE) as node,
    ):
        cluster = node.cluster()
        session = cluster.connect()
        session.execute("CREATE KEYSPACE shop WITH replication = {'class': 'SimpleStrategy', 'replication_factor': 1}")
        texts = [EVERY_VERSION, WITH_OPTIONS, *([VERSION_5, WITH_OPTIONS_5] if version == "5.0" else [])]
        for text in texts:
            for statement in statements(text, "shop"):
                session.execute(statement)
        DATA.mkdir(exist_ok=True)
        described = [row.create_statement for row in session.execute("DESCRIBE KEYSPACE shop WITH INTERNALS")]
        (DATA / f"{version}.cql").write_text("\n\n".join(described) + "\n")
        node.nodetool("snapshot", "-t", "taken", "shop")
        files = sorted(node.folder.glob("data/shop/*/snapshots/taken/schema.cql"))
        (DATA / f"{version}-snapshot.cql").write_text("".join(file.read_text() for file in files))
        tables = [describe(table) for table in read_tables(session).tables if table.keyspace == "shop"]
        tables.sort(key=lambda table: str(table["table"]))
        (DATA / f"{version}.json").write_text("\n".join(json.dumps(table) for table in tables) + "\n")
        cluster.shutdown()


if __name__ == "__main__":
    for chosen in get_args(Version):
        if chosen in sys.argv[1:]:
            make(chosen)
