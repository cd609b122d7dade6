"""What is written into the committed SSTables: what the commit logs have, a random workload, and tables for the files.

The keyspaces `shop`, `MixedCase` and `workload` are those of `tests/commitlogs`. Here is the keyspace `files`: a table
for each compressor, with partitions that are large enough for an index inside them, and a table of many partitions.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tests.commitlogs.schema import REPLICATION
from tests.commitlogs.statements import FAR_TTL, schema_statements, statements
from tests.commitlogs.values import YEAR
from tests.commitlogs.workload import random_schema, random_statements

COMPRESSION = {
    "lz4": "{'class': 'LZ4Compressor', 'chunk_length_in_kb': 16}",
    "lz4_small": "{'class': 'LZ4Compressor', 'chunk_length_in_kb': 4}",
    "ratio": "{'class': 'LZ4Compressor', 'chunk_length_in_kb': 4, 'min_compress_ratio': 1.2}",
    "snappy": "{'class': 'SnappyCompressor', 'chunk_length_in_kb': 16}",
    "zstd": "{'class': 'ZstdCompressor', 'chunk_length_in_kb': 16}",
    "deflate": "{'class': 'DeflateCompressor', 'chunk_length_in_kb': 4}",
    "noop": "{'class': 'NoopCompressor', 'chunk_length_in_kb': 4}",
    "plain": "{'enabled': false}",
}
"""Table: its compression. `ratio`: chunks of noise are stored as they are."""
WIDE_ROWS = dict.fromkeys(COMPRESSION, 100) | {"lz4": 400, "noop": 400, "plain": 400}
"""Table: rows of its wide partitions. 400 are more than 64 KiB even in a flush of a third of them."""
NARROW_PARTITIONS = 1000
WORKLOAD_SEED, WORKLOAD_STATEMENTS = 11, 1400
NOISE_BYTES = 6000


def files_schema() -> Iterator[str]:
    """Yield the statements that create the keyspace `files`."""
    yield f"CREATE KEYSPACE files {REPLICATION}"
    for name, compression in COMPRESSION.items():
        yield (
            f"CREATE TABLE files.{name} (p int, c int, v text, b blob, s text STATIC, PRIMARY KEY (p, c)) "
            f"WITH compression = {compression}"
        )
    yield "CREATE TABLE files.replayed (k int PRIMARY KEY, v text, w text)"
    yield "CREATE TABLE files.narrow (k text PRIMARY KEY, v int)"
    yield "CREATE TABLE files.keyed (a int, b text, c uuid, v int, PRIMARY KEY ((a, b), c))"


def replayed_statements(log_mode: str) -> list[str]:
    """Return what is written before the server is killed, so that it reads these rows from its commit log.

    A TTL that ends after 2038 then overflows the least deletion time of the SSTable's header (5.0.9).
    """
    ttl = FAR_TTL if log_mode == "5.0-v8" else YEAR
    return [
        f"INSERT INTO files.replayed (k, v) VALUES (1, 'far') USING TTL {ttl}",
        "INSERT INTO files.replayed (k, v) VALUES (2, 'for ever')",
        f"UPDATE files.replayed USING TTL {YEAR} SET w = 'near' WHERE k = 1",
        "DELETE FROM files.replayed WHERE k = 3",
    ]


def files_statements() -> Iterator[str]:
    """Yield the statements that write to `files`, in any order of their timestamps."""
    random = Random(5)
    made = [*_wide(random), *_narrow(random), *_keyed(random)]
    random.shuffle(made)
    yield from made


def _wide(random: Random) -> Iterator[str]:
    """Partitions of more than 64 KiB, with deletions of ranges that lie across the blocks of their index."""
    noise = random.randbytes(NOISE_BYTES).hex()
    for table in COMPRESSION:
        for p in range(2):
            for c in range(WIDE_ROWS[table]):
                text = f"{table} {p} {c} " * (48 + c % 5)
                yield f"INSERT INTO files.{table} (p, c, v) VALUES ({p}, {c}, '{text}') USING TIMESTAMP {_time(random)}"
        for p in (2, 3):
            yield f"INSERT INTO files.{table} (p, c, b) VALUES ({p}, 0, 0x{noise}) USING TIMESTAMP {_time(random)}"
        using = f"USING TIMESTAMP {_time(random)}"
        yield f"UPDATE files.{table} {using} SET s = 'static' WHERE p = 0"
        yield f"DELETE FROM files.{table} {using} WHERE p = 0 AND c >= 20 AND c < 130"
        yield f"DELETE FROM files.{table} USING TIMESTAMP {_time(random)} WHERE p = 1 AND c > 80"
        yield f"DELETE FROM files.{table} USING TIMESTAMP {_time(random)} WHERE p = 1 AND c <= 90"
        yield f"DELETE FROM files.{table} {using} WHERE p = 3"


def _narrow(random: Random) -> Iterator[str]:
    for number in range(NARROW_PARTITIONS):
        key = f"{'k' * (number % 7)}{number}"
        yield f"INSERT INTO files.narrow (k, v) VALUES ('{key}', {number}) USING TIMESTAMP {_time(random)}"


def _keyed(random: Random) -> Iterator[str]:
    for number in range(60):
        c = f"{random.getrandbits(32):08x}-0000-4000-8000-000000000000"
        yield (
            f"INSERT INTO files.keyed (a, b, c, v) VALUES ({number % 5}, '{'b' * (number % 4)}', {c}, {number}) "
            f"USING TIMESTAMP {_time(random)}"
        )


def _time(random: Random) -> int:
    return random.randrange(15 * 10**14, 17 * 10**14)


def all_schema_statements(version: str, log_mode: str) -> list[str]:
    """
    Return the statements that create everything.

    :param version: `4.0`, `4.1` or `5.0`.
    :param log_mode: as in `tests/commitlogs/statements.py`.
    """
    return [*schema_statements(log_mode), *random_schema(version), *files_schema()]


def all_statements(version: str, log_mode: str) -> list[str]:
    """Return the statements that write, see :func:`all_schema_statements`."""
    shop = [text for text in statements(log_mode) if log_mode != "5.0-v8" or not _is_unreadable(text)]
    workload = list(random_statements(WORKLOAD_SEED, WORKLOAD_STATEMENTS, version))
    return list(_in_turn(shop, workload, list(files_statements())))


def _is_unreadable(text: str) -> bool:
    """Tell whether 5.0 in mode NONE could not read what it flushes: a partition deletion before 1970."""
    return text.startswith("DELETE FROM shop.times USING TIMESTAMP -") and " AND " not in text


def _in_turn(*lists: list[str]) -> Iterator[str]:
    """Yield all elements, so that each list keeps its order and all end together."""
    places = sorted((i / len(texts), number, i) for number, texts in enumerate(lists) for i in range(len(texts)))
    for _, number, i in places:
        yield lists[number][i]
