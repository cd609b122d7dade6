"""Tables that are altered every few seconds while they are written to."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cassandra import InvalidRequest, OperationTimedOut, Unavailable, WriteFailure, WriteTimeout
from cassandra.cluster import NoHostAvailable

KEYSPACE = "evolving"
ALTERED = tuple(f"{KEYSPACE}.{name}" for name in ("altered", "by_replica"))
"""Altered in the same way; the second one's rows after a change come from its replica."""
STEADY, CUT, TRANSIENT = (f"{KEYSPACE}.{name}" for name in ("steady", "cut", "transient"))
"""Never altered; truncated now and then; dropped and created again."""
BOOTSTRAPPED = (*ALTERED, CUT)
MODES = {ALTERED[1]: {"after_image": "replica"}}
PAUSE_S = 2.0
"""Between two schema changes."""

_FAILED = (Unavailable, WriteTimeout, WriteFailure, OperationTimedOut, NoHostAvailable)


@dataclass
class Evolving:
    """The tables as they are now, and all that is done to them. One thread alters, another one writes.

    :ivar clustering: name that the clustering column has now
    :ivar added: columns of text that were added
    :ivar fields: fields of text that the type has
    :ivar dropped: columns that are away just now
    :ivar refused: statements that named what was just dropped or renamed
    :ivar done: schema changes, in order
    """

    session: Any
    clustering: str = "seq"
    added: list[str] = field(default_factory=list)
    fields: list[str] = field(default_factory=lambda: ["street"])
    dropped: set[str] = field(default_factory=set)
    refused: int = 0
    written: int = 0
    done: list[str] = field(default_factory=list)

    def create(self) -> None:
        """Create the keyspace with everything in it."""
        replication = "{'class': 'SimpleStrategy', 'replication_factor': 3}"
        self.session.execute(f"CREATE KEYSPACE {KEYSPACE} WITH replication = {replication}")
        self.session.execute(f"CREATE TYPE {KEYSPACE}.place (street text)")
        for name in ALTERED:
            self.session.execute(
                f"CREATE TABLE {name} (id int, seq int, price int, note text, home place, homes list<frozen<place>>, "
                "tags set<text>, owner text static, PRIMARY KEY (id, seq)) WITH cdc = true"
            )
        for name in (STEADY, CUT):
            self.session.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, v int) WITH cdc = true")
        self._create_transient()

    def alter_on(self, rounds: int) -> None:
        """Make all kinds of changes, one after the other; at the end all columns and tables are there."""
        for number in range(rounds):
            for change in self._round(number):
                self._alter(change)
                time.sleep(PAUSE_S)

    def _round(self, number: int) -> Iterator[str]:
        yield from (f"ALTER TABLE {name} ADD extra_{number} text" for name in ALTERED)
        self.added.append(f"extra_{number}")
        self.dropped.add("price")
        yield from (f"ALTER TABLE {name} DROP price" for name in ALTERED)
        yield f"ALTER TYPE {KEYSPACE}.place ADD f_{number} text"
        self.fields.append(f"f_{number}")
        yield f"DROP TABLE {TRANSIENT}"
        yield f"DROP TYPE {KEYSPACE}.thing"
        yield from (f"ALTER TABLE {name} ADD price int" for name in ALTERED)
        self.dropped.discard("price")
        for name in ALTERED:
            yield f"ALTER TABLE {name} RENAME {self.clustering} TO seq_{number}"
        self.clustering = f"seq_{number}"
        self._create_transient()
        self.dropped.add("tags")
        yield from (f"ALTER TABLE {name} DROP tags" for name in ALTERED)
        yield f"TRUNCATE {CUT}"
        yield from (f"ALTER TABLE {name} ADD tags set<text>" for name in ALTERED)
        self.dropped.discard("tags")

    def _create_transient(self) -> None:
        self._alter(f"CREATE TYPE {KEYSPACE}.thing (name text)")
        self._alter(f"CREATE TABLE {TRANSIENT} (id int PRIMARY KEY, v int, it frozen<thing>) WITH cdc = true")

    def _alter(self, statement: str) -> None:
        self.session.execute(statement, timeout=60)
        self.done.append(f"{time.time():.3f} {statement}")

    def write_on(self, ended: threading.Event, rate: float, seed: int = 19) -> None:
        """Write until the event is set.

        :param rate: numbers a second, each some statements
        """
        for number, statements in enumerate(self._statements(random.Random(seed))):
            for statement in statements:
                self._write(statement)
            if ended.wait(1 / rate) or number > 10**9:
                return

    def _write(self, statement: str) -> None:
        """Write. Who gets no answer asks again, but not about a table that may be dropped just now."""
        while True:
            try:
                self.session.execute(statement)
                self.written += 1
                return
            except InvalidRequest:
                self.refused += 1
                return
            except _FAILED:
                if f" {TRANSIENT} " in statement:
                    self.refused += 1
                    return
                time.sleep(0.5)

    def _statements(self, chance: random.Random) -> Iterator[list[str]]:
        for number in itertools.count(1):
            key, place = chance.randrange(12), chance.randrange(9)
            found = [self._altered(name, chance.randrange(10), number, key, place) for name in ALTERED]
            found += [f"INSERT INTO {name} (id, v) VALUES ({number % 97}, {number})" for name in (STEADY, CUT)]
            found += [f"INSERT INTO {TRANSIENT} (id, v, it) VALUES ({number % 31}, {number}, {{name: 'n{number}'}})"]
            yield found

    def _altered(self, name: str, kind: int, number: int, key: int, place: int) -> str:
        seq, where = self.clustering, f"WHERE id = {key} AND {self.clustering} = {place}"
        home = ", ".join(f"{one}: '{one}-{number}'" for one in self.fields[-1 - number % 3 :])
        using = "USING TTL 86400 " if number % 4 == 0 else ""
        match kind:
            case 0 | 1 if "price" not in self.dropped:
                return f"INSERT INTO {name} (id, {seq}, price, note) VALUES ({key}, {place}, {number}, 'n') {using}"
            case 2 | 3 if self.added:
                column = self.added[number % len(self.added)]
                return f"UPDATE {name} {using}SET {column} = 'x{number}', note = 'n{number}' {where}"
            case 4:
                return f"UPDATE {name} SET home.{self.fields[-1]} = 'part-{number}' {where}"
            case 5:
                return f"UPDATE {name} {using}SET home = {{{home}}}, homes = [{{{home}}}] {where}"
            case 6 if "tags" not in self.dropped:
                # A row that has nothing but what is dropped would vanish without a message (docs/messages.md).
                tags = f"tags = tags + {{'t{number % 7}'}}"
                return f"UPDATE {name} {using}SET {tags}, note = 'n', owner = 'o{number}' {where}"
            case 7 if number % 3 == 0:
                return f"DELETE FROM {name} WHERE id = {key} AND {seq} > {place}"
            case 7 if number % 11 == 1:
                return f"DELETE FROM {name} WHERE id = {key}"
            case 8:
                return f"DELETE FROM {name} {where}"
            case 9 if "price" not in self.dropped:
                return f"DELETE price FROM {name} {where}"
        return f"INSERT INTO {name} (id, {seq}, note) VALUES ({key}, {place}, 'n{number}')"


@contextlib.contextmanager
def in_background(*functions: Any) -> Iterator[list[threading.Thread]]:
    """Run functions in threads of their own; the block ends when they have, and fails if one has failed."""
    failed: list[BaseException] = []

    def run(function: Any) -> None:
        try:
            function()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        for thread in threads:
            thread.join()
    if failed:
        raise failed[0]
