"""Partition keys as people type them."""

import pytest

from ringsync.cql.key_literals import PartitionKeyError, parse_partition_key
from ringsync.cql.types import CqlType, ListType, Native, SetType, VectorType

VECTOR = VectorType(Native("float"), 2)
INT = Native("int")


@pytest.mark.parametrize(
    ("text", "types", "key"),
    [
        ("[1.5, -2.5]", [VECTOR], "3fc00000c0200000"),
        ("7, [1.5, -2.5]", [INT, VECTOR], "00040000000700" + "00083fc00000c020000000"),
        ("['a']", [VectorType(Native("text"), 1)], "0161"),
        (
            "[[1], [2, 3]]",
            [VectorType(ListType(INT), 2)],
            "0c000000010000000400000001140000000200000004000000020000000400000003",
        ),
        ("[1, 2]", [ListType(INT)], "0000000200000004000000010000000400000002"),
        ("0x00ff", [VECTOR], "00ff"),
        ("12.50", [Native("decimal")], "0000000204e2"),
    ],
)
def test_keys(text: str, types: list[CqlType], key: str) -> None:
    assert parse_partition_key(text, types).hex() == key


@pytest.mark.parametrize(
    ("text", "cql_type", "told"),
    [
        ("[1.5]", VECTOR, "is not a value of type vector<float, 2>: it has 1 elements"),
        ("1.5", VECTOR, "write [value, value, …]"),
        ("['x', 1]", VECTOR, "write a number"),
        ("[1", VECTOR, "expected ] at character 3"),
        ("[]", VECTOR, "expected a number"),
        ("[1]", INT, "write one value, without brackets"),
        ("[1]", SetType(INT), "write it as Cassandra serialises it, 0x…"),
    ],
)
def test_what_is_no_key_is_told(text: str, cql_type: CqlType, told: str) -> None:
    with pytest.raises(PartitionKeyError) as caught:
        parse_partition_key(text, [cql_type])
    assert told in str(caught.value)
