"""Tests of hashes against published vectors, the driver's two implementations, and a node's own token()."""

import struct

import pyarrow as pa
import pytest
from cassandra.metadata import Murmur3Token
from cassandra.murmur3 import murmur3 as python_token
from hypothesis import given, settings
from hypothesis import strategies as st

from ringsync.cql.murmur3 import murmur3_128, tokens


@pytest.mark.parametrize(
    ("text", "digest"),
    [
        (b"", "00000000000000000000000000000000"),
        (b"hello", "cbd8a7b341bd9b025b1e906a48ae1d19"),
        (b"hello, world", "342fac623a5ebc8e4cdcbc079642414d"),
        (b"19 Jan 2038 at 3:14:07 AM", "b89e5988b737affc664fc2950231b2cb"),
        (b"The quick brown fox jumps over the lazy dog.", "cd99481f9ee902c9695da1a38987b6e7"),
    ],
)
def test_published_vectors(text: bytes, digest: str) -> None:
    """From the test suite of spaolacci/murmur3."""
    first, second = murmur3_128(pa.array([text]))
    assert struct.pack(">qq", first[0], second[0]).hex() == digest


def reference_128(data: bytes) -> tuple[int, int]:
    """Compute MurmurHash3_x64_128 like Austin Appleby's C++, with Python's numbers."""
    mask, c1, c2 = 2**64 - 1, 0x87C37B91114253D5, 0x4CF5AD432745937F

    def rotate(value: int, bits: int) -> int:
        return (value << bits | value >> (64 - bits)) & mask

    def finish(value: int) -> int:
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            value = (value ^ value >> 33) * factor & mask
        return value ^ value >> 33

    h1 = h2 = 0
    whole = len(data) // 16 * 16
    for at in range(0, whole, 16):
        k1, k2 = struct.unpack_from("<QQ", data, at)
        h1 ^= rotate(k1 * c1 & mask, 31) * c2 & mask
        h1 = ((rotate(h1, 27) + h2) * 5 + 0x52DCE729) & mask
        h2 ^= rotate(k2 * c2 & mask, 33) * c1 & mask
        h2 = ((rotate(h2, 31) + h1) * 5 + 0x38495AB5) & mask
    k1, k2 = struct.unpack("<QQ", data[whole:].ljust(16, b"\0"))
    h1 ^= rotate(k1 * c1 & mask, 31) * c2 & mask ^ len(data)
    h2 ^= rotate(k2 * c2 & mask, 33) * c1 & mask ^ len(data)
    h1 = (h1 + h2) & mask
    h2 = (h2 + h1) & mask
    h1, h2 = finish(h1), finish(h2)
    h1 = (h1 + h2) & mask
    return h1, (h2 + h1) & mask


def signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=70), max_size=8), st.integers(0, 8))
def test_random_values(values: list[bytes], cut: int) -> None:
    first, second = murmur3_128(pa.array(values, pa.binary())[cut:])
    assert list(zip(first.tolist(), second.tolist(), strict=True)) == [
        tuple(map(signed, reference_128(value))) for value in values[cut:]
    ]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=70), max_size=8), st.integers(0, 8))
def test_tokens_are_the_drivers(keys: list[bytes], cut: int) -> None:
    array = pa.array(keys, pa.large_binary())[cut:]
    assert tokens(array).tolist() == [Murmur3Token.hash_fn(key) for key in keys[cut:]]
    assert tokens(array).tolist() == [python_token(key) for key in keys[cut:]]


def test_the_two_hashes_differ_only_by_signed_bytes_at_the_end() -> None:
    plain, odd = pa.array([b"\xff" * 16 + b"abc"]), pa.array([b"abc\xff"])
    assert tokens(plain).tolist() == murmur3_128(plain)[0].tolist()
    assert tokens(odd).tolist() != murmur3_128(odd)[0].tolist()


def test_the_empty_key_and_the_lowest_token() -> None:
    assert tokens(pa.array([b"", b"a"])[:1]).tolist() == [-(2**63)]
    # Found by running the hash backwards:
    hashes_to_lowest = bytes.fromhex("653cbefb85ec3111b4e38fa9bc7cbcae")
    assert murmur3_128(pa.array([hashes_to_lowest]))[0].tolist() == [-(2**63)]
    assert tokens(pa.array([hashes_to_lowest])).tolist() == [2**63 - 1]


def test_nulls_are_refused() -> None:
    with pytest.raises(ValueError, match="1 of 2 values are null"):
        tokens(pa.array([b"a", None]))
    assert tokens(pa.array([b"a", None])[:1]).tolist() == [Murmur3Token.hash_fn(b"a")]
