"""Writes tries like those of Partitions.db, with every type of node that fits (C: io/tries/TrieNode)."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

PAYLOAD_ONLY, SINGLE_4, SINGLE_8, SINGLE_12, SINGLE_16, SPARSE_8, SPARSE_12 = range(7)
WIDTHS = {5: 1, 7: 2, 8: 3, 9: 5, 11: 2, 12: 3, 13: 4, 14: 5, 15: 8}
"""Bytes of the distance to each child; types 6 and 10 pack two distances of 12 bits into three bytes."""
MOST_PADDING = 300


@dataclass(frozen=True)
class RandomTrie:
    """
    A Partitions.db.

    :param content: its bytes.
    :param tokens: of its partitions; `prefixes`: their keys in the trie; `positions`: in Data.db.
    :param types: the types of nodes that are in it.
    """

    content: bytes
    tokens: list[int]
    prefixes: list[bytes]
    positions: list[int]
    types: set[int]


def random_trie(random: Random, count: int) -> RandomTrie:
    """Return a Partitions.db with some partitions."""
    chosen = {random.randrange(-(2**63), 2**63) for _ in range(-(-count // 2))}
    near = list(chosen)[:50]
    while len(chosen) < count:  # neighbours have long prefixes in common
        chosen.add(random.choice(near) ^ random.randrange(1 << 12))
    tokens = sorted(chosen)
    keys = [b"\x40" + (token + 2**63).to_bytes(8, "big") + b"\x40" for token in tokens]
    prefixes = [key[: _common(key, keys[i - 1 : i] + keys[i + 1 : i + 2]) + 1] for i, key in enumerate(keys)]
    positions = [0, *sorted(random.sample(range(1, 1 << random.choice((20, 39))), count - 1))]
    hashes = [random.choice((None, random.randbytes(1))) for _ in keys]
    writer = TrieWriter(random)
    root = writer.write(list(zip(prefixes, hashes, [~position for position in positions], strict=True)))
    footer = b"".join(number.to_bytes(8, "big") for number in (len(writer.data), count, root))
    return RandomTrie(bytes(writer.data) + footer, tokens, prefixes, positions, set(writer.types))


def _common(key: bytes, others: list[bytes]) -> int:
    """The bytes that a key has in common with the one of the others that is most like it."""
    return max((next(i for i, byte in enumerate(key) if byte != other[i]) for other in others), default=-1)


class TrieWriter:
    """
    The bytes of a trie, and the types of its nodes.

    :param random: chooses among the types that fit.
    """

    def __init__(self, random: Random) -> None:
        self.data = bytearray()
        self.types: set[int] = set()
        self._random = random

    def write(self, keys: list[tuple[bytes, bytes | None, int]]) -> int:
        """
        Write a trie; return the place of its root.

        :param keys: sorted; each with its hash byte, if it has one, and its value.
        """
        return self._node(keys, 0)

    def _node(self, keys: list[tuple[bytes, bytes | None, int]], depth: int) -> int:
        children: dict[int, list[tuple[bytes, bytes | None, int]]] = {}
        payload = None
        for key in keys:
            if len(key[0]) == depth:
                payload = key[1:]
            else:
                children.setdefault(key[0][depth], []).append(key)
        places = {byte: self._node(of_child, depth + 1) for byte, of_child in children.items()}
        self.data += bytes(self._random.randrange(MOST_PADDING) if self._random.random() < 0.05 else 0)
        place = len(self.data)
        self.data += self._encoded({byte: place - child for byte, child in places.items()}, payload)
        return place

    def _encoded(self, deltas: dict[int, int], payload: tuple[bytes | None, int] | None) -> bytes:
        bits, content = 0, b""
        if payload is not None:
            hash_byte, value = payload
            size = ((value if value >= 0 else ~value).bit_length() + 8) // 8
            content = (hash_byte or b"") + value.to_bytes(size, "big", signed=True)
            bits = size + 7 if hash_byte else size
        kind = self._random.choice(list(self._fitting(deltas, payload is not None)))
        self.types.add(kind)
        if kind == PAYLOAD_ONLY:
            return bytes([bits]) + content
        if kind <= SINGLE_16:
            ((byte, delta),) = deltas.items()
            head = {
                SINGLE_4: bytes([0x10 | delta & 15, byte]),
                SINGLE_8: bytes([0x20 | bits, byte, delta & 255]),
                SINGLE_12: bytes([0x30 | delta >> 8 & 15, delta & 255, byte]),
                SINGLE_16: bytes([0x40 | bits, byte]) + (delta & 0xFFFF).to_bytes(2, "big"),
            }[kind]
            return head + content
        if kind < 10:
            head, listed = bytes([kind << 4 | bits, len(deltas), *deltas]), list(deltas.values())
        else:
            first, last = min(deltas), max(deltas)
            head = bytes([kind << 4 | bits, first, last - first])
            listed = [deltas.get(byte, 0) for byte in range(first, last + 1)]
        if kind in WIDTHS:
            return head + b"".join(delta.to_bytes(WIDTHS[kind], "big") for delta in listed) + content
        packed = "".join(f"{delta:03x}" for delta in listed)
        return head + bytes.fromhex(packed + "0" * (len(packed) % 2)) + content

    def _fitting(self, deltas: dict[int, int], has_payload: bool) -> list[int]:
        if not deltas:
            return [PAYLOAD_ONLY]
        highest = max(deltas.values())
        kinds = [kind for kind, width in WIDTHS.items() if highest < 1 << 8 * width]
        kinds += [SPARSE_12, 10] if highest < 1 << 12 else []
        if len(deltas) > 255:
            return [kind for kind in kinds if kind >= 10]
        if len(deltas) == 1:
            kinds += [SINGLE_8] if highest < 1 << 8 else []
            kinds += [SINGLE_16] if highest < 1 << 16 else []
            if not has_payload:
                kinds += [SINGLE_4] if highest < 1 << 4 else []
                kinds += [SINGLE_12] if highest < 1 << 12 else []
        return kinds
