"""Write rows of shop.orders into the nodes of docker-compose.yaml: `write_rows.py FIRST COUNT`."""

import sys
from decimal import Decimal

from cassandra import ConsistencyLevel
from cassandra.cluster import Cluster
from cassandra.concurrent import execute_concurrent_with_args

first, count = int(sys.argv[1]), int(sys.argv[2])
with Cluster(["cassandra-1", "cassandra-2", "cassandra-3"]) as cluster:
    session = cluster.connect()
    session.default_timeout = 60
    session.execute(
        "CREATE KEYSPACE IF NOT EXISTS shop WITH replication = {'class': 'NetworkTopologyStrategy', 'dc1': 3}"
    )
    session.execute(
        "CREATE TABLE IF NOT EXISTS shop.orders (customer text, number int, amount decimal, tags set<text>, "
        "PRIMARY KEY (customer, number)) WITH cdc = true"
    )
    insert = session.prepare("INSERT INTO shop.orders (customer, number, amount, tags) VALUES (?, ?, ?, ?)")
    insert.consistency_level = ConsistencyLevel.QUORUM
    rows = [(f"c{n % 50}", n, Decimal(n) / 100, {"a", f"{n}"}) for n in range(first, first + count)]
    execute_concurrent_with_args(session, insert, rows, concurrency=50)
    print(count, "rows written from", first, "on")
