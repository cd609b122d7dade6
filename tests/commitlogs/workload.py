"""A random workload over all types and kinds of statement, the same for the same seed.

Few keys, so that statements meet. Partitions with an even number get explicit timestamps only, in any order; in the
others most statements have the time at which they come, and everything that has to read before it writes is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from ringsync.cql.types import CqlType, ListType, MapType, SetType, UserType, is_multicell, parse_type
from tests.commitlogs.literals import literal
from tests.commitlogs.schema import NATIVES, REPLICATION

KEYSPACE = "workload"
YEAR = 365 * 86400
PARTITIONS, CLUSTERINGS, ORDERED_CLUSTERINGS = 12, 4, 2
ADDRESS = ("street text", "number int", "tags frozen<set<text>>")
USER_TYPE = UserType(
    KEYSPACE,
    "address",
    tuple(part.split(" ")[0] for part in ADDRESS),
    tuple(parse_type(part.split(" ")[1], {}) for part in ADDRESS),
)
ORDERED = ("tinyint", "smallint", "date", "time", "boolean", "uuid", "float", "double", "varint", "timestamp", "ascii")
"""One clustering column of each."""


@dataclass(frozen=True)
class Table:
    """
    A table of the workload.

    :param name: without keyspace.
    :param partition: name and type of each column of the partition key.
    :param clustering: the same for clustering columns.
    :param static: the same for static columns.
    :param regular: the same for the others.
    :param descending: clustering columns with descending order.
    :param pool: how many values of each clustering column occur.
    """

    name: str
    partition: dict[str, str]
    clustering: dict[str, str] = field(default_factory=dict)
    static: dict[str, str] = field(default_factory=dict)
    regular: dict[str, str] = field(default_factory=dict)
    descending: frozenset[str] = frozenset()
    pool: int = CLUSTERINGS

    @property
    def full_name(self) -> str:
        """Keyspace and name."""
        return f"{KEYSPACE}.{self.name}"

    @property
    def creation(self) -> str:
        """The statement that creates it, with cdc."""
        columns = {**self.partition, **self.clustering, **self.regular}
        listed = [f"{name} {of}" for name, of in columns.items()]
        listed += [f"{name} {of} STATIC" for name, of in self.static.items()]
        key = ", ".join([f"({', '.join(self.partition)})", *self.clustering])
        order = ", ".join(f"{name} {'DESC' if name in self.descending else 'ASC'}" for name in self.clustering)
        options = [f"CLUSTERING ORDER BY ({order})"] if order else []
        options.append("cdc = true")
        return f"CREATE TABLE {self.full_name} ({', '.join(listed)}, PRIMARY KEY ({key})) WITH {' AND '.join(options)}"


def tables(version: str) -> list[Table]:
    """
    Return the tables of the workload.

    :param version: `4.0`, `4.1` or `5.0`.
    """
    collections = {
        "l": "list<int>",
        "lt": "list<text>",
        "lf": "list<frozen<map<text, frozen<list<int>>>>>",
        "s": "set<uuid>",
        "sd": "set<decimal>",
        "st": "set<frozen<tuple<int, text>>>",
        "m": "map<text, double>",
        "mf": "map<int, frozen<address>>",
        "u": "address",
        "fu": "frozen<address>",
        "t": "tuple<int, text, frozen<list<double>>>",
        "fl": "frozen<list<inet>>",
        "fs": "frozen<set<date>>",
        "fm": "frozen<map<varint, blob>>",
    }
    if version == "5.0":
        collections |= {"v": "vector<float, 3>", "vt": "vector<text, 2>", "lv": "list<frozen<vector<int, 2>>>"}
    key, ordered = {"p": "int"}, {f"c_{name}": name for name in ORDERED}
    return [
        Table(
            "natives",
            key,
            {"c": "text", "d": "int"},
            {"s_text": "text", "s_int": "int"},
            {f"v_{name}": name for name in NATIVES},
            frozenset({"c"}),
        ),
        Table("collections", {"p": "text"}, {"c": "timestamp"}, {"sm": "map<text, int>", "su": "address"}, collections),
        Table(
            "keyed",
            {"a": "int", "b": "text", "k": "blob"},
            {"d": "decimal", "e": "timeuuid", "f": "inet"},
            {},
            {"v": "text", "w": "varint"},
            frozenset({"d", "f"}),
        ),
        Table(
            "ordered",
            {"p": "bigint"},
            ordered,
            {},
            {"v": "text"},
            frozenset({"c_smallint", "c_timestamp"}),
            ORDERED_CLUSTERINGS,
        ),
        Table("single", key, {}, {}, {"v": "text", "w": "bigint", "m": "map<int, int>"}),
        Table("many", key, {"c": "int"}, {}, {f"v{number:02}": "int" for number in range(70)}),
        Table("counters", key, {"c": "int"}, {"s": "counter"}, {"n": "counter", "m": "counter"}),
    ]


def random_schema(version: str) -> list[str]:
    """
    Return the statements that create the workload's keyspace, type and tables.

    :param version: `4.0`, `4.1` or `5.0`.
    """
    return [
        f"CREATE KEYSPACE {KEYSPACE} {REPLICATION}",
        f"CREATE TYPE {KEYSPACE}.address ({', '.join(ADDRESS)})",
        *(table.creation for table in tables(version)),
    ]


def random_statements(seed: int, count: int, version: str) -> Iterator[str]:
    """
    Yield statements that change rows; each can be executed as it is, in this order, after `random_schema`.

    No row of them expires within a year, and no statement fails. Counters are only ever added to.

    :param seed: the same seed gives the same statements.
    :param count: how many.
    :param version: `4.0`, `4.1` or `5.0`.
    """
    random = Random(seed)
    *writers, counters = (_Writer(random, table) for table in tables(version))
    # The answer to a condition that fails is the row: the driver cannot decode every timestamp of the others.
    readers = [writer for writer in writers if writer.table.name in ("collections", "single")]
    made = 0
    while made < count:
        writer = random.choice(writers)
        kind = random.random()
        if kind < 0.10:
            found = [counters.count()]
        elif kind < 0.25:
            found = [_batch(random, writers)]
        elif kind < 0.30:
            found = random.choice(readers).read_first()
        else:
            found = [writer.change()]
        yield from found[: count - made]
        made += len(found)


def _batch(random: Random, writers: list[_Writer]) -> str:
    """A batch of one partition, or of several tables."""
    kind = random.choice(("", "UNLOGGED "))
    count = random.randrange(2, 7)
    if random.random() < 0.6:
        writer, partition = random.choice(writers), random.randrange(PARTITIONS)
        parts = [writer.change(partition) for _ in range(count)]
    else:
        parts = [random.choice(writers).change() for _ in range(count)]
    return f"BEGIN {kind}BATCH {' '.join(f'{part};' for part in parts)} APPLY BATCH"


class _Writer:
    """Makes statements for one table."""

    def __init__(self, random: Random, table: Table) -> None:
        self.random = random
        self.table = table
        self.types = {
            name: parse_type(text, {"address": USER_TYPE})
            for name, text in {**table.partition, **table.clustering, **table.static, **table.regular}.items()
        }
        self.partitions = [self.partition_key() for _ in range(PARTITIONS)]
        self.clusterings = {name: [self.literal(name, True) for _ in range(table.pool)] for name in table.clustering}

    def literal(self, name: str, key: bool = False) -> str:
        return literal(self.random, self.types[name], key)

    def partition_key(self) -> list[str]:
        """Values of a partition key; never a single empty text, which the server refuses."""
        while (values := [self.literal(name, True) for name in self.table.partition]) == ["''"]:
            pass
        return values

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def change(self, partition: int | None = None) -> str:
        """An insert, an update or a deletion, in the given or any partition."""
        partition = self.random.randrange(PARTITIONS) if partition is None else partition
        kind = self.random.random()
        if kind < 0.45:
            return self.insert(partition)
        if kind < 0.75:
            return self.update(partition)
        if kind < 0.83:
            return self.delete_cells(partition)
        if kind < 0.91 or not self.table.clustering:
            return self.delete_row(partition)
        return self.delete_range(partition) if kind < 0.985 else self.delete_partition(partition)

    def read_first(self) -> list[str]:
        """What needs to know the row: entries of a list by index (a list is written before), conditions."""
        partition = self.random.randrange(1, PARTITIONS, 2)
        where = self.where(partition, self.clustering())
        name = self.table.full_name
        if "l" in self.types:
            index = self.random.randrange(3)
            change = f"UPDATE {name} SET l[{index}] = {self.random.randrange(100)} WHERE {where}"
            if self.chance(0.3):
                change = f"DELETE l[{index}] FROM {name} WHERE {where}"
            return [f"UPDATE {name} SET l = [1, 2, {self.random.randrange(100)}] WHERE {where}", change]
        condition, column = self.random.randrange(3), self.random.choice(list(self.table.regular))
        if condition == 0:
            return [f"{self.insert(partition, using=False)} IF NOT EXISTS"]
        if condition == 1:
            return [f"UPDATE {name} SET {column} = {self.literal(column)} WHERE {where} IF w != 7"]
        return [f"DELETE FROM {name} WHERE {where} IF EXISTS"]

    def insert(self, partition: int, using: bool = True) -> str:
        columns = [*self.table.partition, *self.table.clustering]
        values = [*self.partitions[partition], *self.clustering()]
        chosen = self.some([*self.table.static, *self.table.regular], least=0)
        columns += chosen
        values += ["null" if self.chance(0.05) else self.literal(name) for name in chosen]
        text = f"INSERT INTO {self.table.full_name} ({', '.join(columns)}) VALUES ({', '.join(values)})"
        return text + self.using(partition, ttl=True) if using else text

    def update(self, partition: int) -> str:
        static = bool(self.table.static) and self.chance(0.15)
        chosen = self.some(list(self.table.static if static else self.table.regular))
        assignments = ", ".join(self.assignment(name) for name in chosen)
        where = self.where(partition, [] if static else self.clustering())
        return f"UPDATE {self.table.full_name}{self.using(partition, ttl=True)} SET {assignments} WHERE {where}"

    def delete_cells(self, partition: int) -> str:
        static = bool(self.table.static) and self.chance(0.2)
        chosen = self.some(list(self.table.static if static else self.table.regular), most=3)
        cells = ", ".join(self.deleted(name) for name in chosen)
        where = self.where(partition, [] if static else self.clustering())
        return f"DELETE {cells} FROM {self.table.full_name}{self.using(partition)} WHERE {where}"

    def delete_row(self, partition: int) -> str:
        using = self.using(partition, negative=False)
        return f"DELETE FROM {self.table.full_name}{using} WHERE {self.where(partition, self.clustering())}"

    def delete_partition(self, partition: int) -> str:
        using = self.using(partition, negative=False)
        return f"DELETE FROM {self.table.full_name}{using} WHERE {self.where(partition, [])}"

    def delete_range(self, partition: int) -> str:
        """Equal values of some clustering columns, bounds of the next one: lower, upper, both or none."""
        names = list(self.table.clustering)
        equal = self.random.randrange(len(names))
        where, name = self.where(partition, self.clustering()[:equal]), names[equal]
        lower, upper = f"{name} {self.random.choice(('>', '>='))} ", f"{name} {self.random.choice(('<', '<='))} "
        bounds = self.random.choice(([lower], [upper], [lower, upper], [f"{name} = "]))
        conditions = [where, *(bound + self.random.choice(self.clusterings[name]) for bound in bounds)]
        using = self.using(partition, negative=False)
        return f"DELETE FROM {self.table.full_name}{using} WHERE {' AND '.join(conditions)}"

    def count(self) -> str:
        """One or more counters of a row, a static one, or a batch of them."""
        updates = []
        for _ in range(self.random.choice((1, 1, 1, 2, 4))):
            static = self.chance(0.2)
            chosen = self.some(list(self.table.static if static else self.table.regular))
            sums = ", ".join(
                f"{name} = {name} {self.random.choice('+-')} {self.random.randrange(1 << 40)}" for name in chosen
            )
            where = self.where(self.random.randrange(PARTITIONS), [] if static else self.clustering())
            updates.append(f"UPDATE {self.table.full_name} SET {sums} WHERE {where}")
        if len(updates) == 1:
            return updates[0]
        return f"BEGIN COUNTER BATCH {' '.join(f'{update};' for update in updates)} APPLY BATCH"

    def some(self, names: list[str], least: int = 1, most: int | None = None) -> list[str]:
        """Some of the columns: few, any number, or all."""
        limit = len(names) if most is None else min(most, len(names))
        count = self.random.choice((least, min(2, limit), self.random.randint(least, limit), limit))
        return self.random.sample(names, count)

    def clustering(self) -> list[str]:
        return [self.random.choice(pool) for pool in self.clusterings.values()]

    def where(self, partition: int, clustering: list[str]) -> str:
        names = [*self.table.partition, *self.table.clustering]
        values = [*self.partitions[partition], *clustering]
        return " AND ".join(f"{name} = {value}" for name, value in zip(names, values, strict=False))

    def using(self, partition: int, ttl: bool = False, negative: bool = True) -> str:
        """A USING clause, or nothing. Negative times of deletions: 5.0.9 cannot read what it flushes of them."""
        parts = []
        if partition % 2 == 0 or self.chance(0.2):
            early = negative and self.chance(0.05)
            time = (
                self.random.randrange(-(10**15), 10**15) if early else self.random.randrange(15 * 10**14, 17 * 10**14)
            )
            parts.append(f"TIMESTAMP {time}")
        if ttl and self.chance(0.2):
            parts.append(f"TTL {self.random.randrange(YEAR, 10 * YEAR)}")
        return f" USING {' AND '.join(parts)}" if parts else ""

    def assignment(self, name: str) -> str:
        cql_type = self.types[name]
        if self.chance(0.05):
            return f"{name} = null"
        if not is_multicell(cql_type) or self.chance(0.3):
            return f"{name} = {self.literal(name)}"
        match cql_type:
            case ListType():
                items = self.items(cql_type)
                return self.random.choice(
                    (f"{name} = {name} + {items}", f"{name} = {items} + {name}", f"{name} = {name} - {items}")
                )
            case SetType():
                return f"{name} = {name} {self.random.choice('++-')} {self.items(cql_type)}"
            case MapType(key, value):
                one = literal(self.random, key, True)
                put = "null" if self.chance(0.2) else literal(self.random, value)
                add, remove = self.items(cql_type), self.items(SetType(key))
                return self.random.choice(
                    (f"{name}[{one}] = {put}", f"{name} = {name} + {add}", f"{name} = {name} - {remove}")
                )
            case UserType():
                part, of = self.random.choice(list(zip(cql_type.field_names, cql_type.field_types, strict=True)))
                return f"{name}.{part} = {'null' if self.chance(0.2) else literal(self.random, of)}"
        raise ValueError(f"{name} is of type {cql_type}")

    def items(self, cql_type: CqlType) -> str:
        """A collection that is not empty."""
        while (found := literal(self.random, cql_type)) in ("[]", "{}"):
            pass
        return found

    def deleted(self, name: str) -> str:
        """What stands after DELETE: a column, an entry of a map, an element of a set, a field."""
        cql_type = self.types[name]
        if not is_multicell(cql_type) or self.chance(0.4):
            return name
        match cql_type:
            case SetType(of) | MapType(of, _):
                return f"{name}[{literal(self.random, of, True)}]"
            case UserType():
                return f"{name}.{self.random.choice(cql_type.field_names)}"
        return name
