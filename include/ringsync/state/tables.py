"""The tables of ringsync's own keyspace; docs/state.md shows the same statements to administrators."""

from __future__ import annotations

TABLES = {
    "bootstrap": """CREATE TABLE IF NOT EXISTS {keyspace}.bootstrap (
        keyspace_name text, table_name text, id text, state text, specification text, run text,
        as_of timestamp, started_at timestamp, completed_at timestamp,
        PRIMARY KEY ((keyspace_name, table_name)))""",
    "bootstrap_range": """CREATE TABLE IF NOT EXISTS {keyspace}.bootstrap_range (
        bootstrap_id text, start_token bigint, end_token bigint,
        owner text static, attempt int static, alive text static,
        committed_by int, committed_at timestamp, rows bigint, cells bigint, pages bigint, bytes bigint, outputs text,
        PRIMARY KEY (bootstrap_id, start_token))""",
    "processor_error": """CREATE TABLE IF NOT EXISTS {keyspace}.processor_error (
        node text, file text, position bigint, length bigint, reason text, table_id blob, raw blob, raw_object text,
        PRIMARY KEY ((node, file), position))""",
    "out_of_sequence": """CREATE TABLE IF NOT EXISTS {keyspace}.out_of_sequence (
        late_file text, shard int,
        shards int static, admitted_at timestamp static, due timestamp static, attempts int static, waiting int static,
        digest blob, table_id blob, partition_key blob, clustering blob, kind tinyint, write_time bigint,
        PRIMARY KEY ((late_file, shard), digest))""",
}
"""CREATE TABLE by name; ``{keyspace}`` stands for the keyspace."""
