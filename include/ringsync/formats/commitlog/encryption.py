"""Encrypted sections of a commit log (docs/formats.md, 1.3; C: security/EncryptionUtils,
db/commitlog/EncryptedFileSegmentInputStream): compressed in blocks, each encrypted by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.padding import PKCS7

from ringsync.formats.commitlog.compression import BlockError, decompressor

CIPHER = "AES/CBC/PKCS5Padding"
"""What Cassandra encrypts by if nothing else is set."""
_HEADER = 8
"""Bytes before a block: its length, and that of what is in it."""


def decryptor(parameters: dict[str, Any], key_of: Callable[[str], bytes] | None) -> Callable[[memoryview, int], bytes]:
    """A function (what follows a section's length, bytes of the result) → the section's records.

    :param parameters: of the segment's descriptor
    :param key_of: the AES key of an alias
    :raises ValueError: when the key is missing, or the cipher is another one
    """
    cipher, alias = str(parameters["encCipher"]), str(parameters.get("encKeyAlias"))
    if cipher != CIPHER:
        raise ValueError(f"encrypted by {cipher}, which is not known; known is {CIPHER}")
    if key_of is None:
        raise ValueError(f"encrypted by the key {alias}, and no keystore or key was given")
    algorithm = algorithms.AES(key_of(alias))
    mode = modes.CBC(bytes.fromhex(str(parameters.get("encIV"))))
    mode.validate_for_algorithm(algorithm)
    return _Decryptor(Cipher(algorithm, mode), alias).section


class _Decryptor:
    def __init__(self, cipher: Cipher[modes.CBC], alias: str) -> None:
        self._cipher = cipher
        self._alias = alias
        self._decompress = decompressor("LZ4Compressor")

    def section(self, content: memoryview, length: int) -> bytes:
        """All blocks; a mutation may begin in one and end in the next."""
        parts = []
        position = 0
        while position < len(content):
            header = content[position : position + _HEADER]
            encrypted, plain = (int.from_bytes(header[at : at + 4], "big", signed=True) for at in (0, 4))
            position += _HEADER
            if len(header) < _HEADER or not 0 <= encrypted <= len(content) - position:
                raise BlockError(f"an encrypted block says that it has {encrypted} bytes and is cut off")
            parts.append(self._block(content[position : position + encrypted], plain))
            position += encrypted
        found = b"".join(parts)
        if len(found) != length:
            raise BlockError(f"{len(parts)} encrypted blocks hold {len(found)} bytes instead of {length}")
        return found

    def _block(self, encrypted: memoryview, plain: int) -> bytes:
        decryptor, unpadder = self._cipher.decryptor(), PKCS7(128).unpadder()
        try:
            padded = decryptor.update(encrypted) + decryptor.finalize()
            block = unpadder.update(padded) + unpadder.finalize()
        except ValueError as error:
            raise BlockError(
                f"{len(encrypted)} bytes cannot be decrypted: damaged, or this is not the key {self._alias} "
                "that they were encrypted by"
            ) from error
        if len(block) != plain or plain < 4:
            raise BlockError(f"an encrypted block has {len(block)} bytes instead of {plain}")
        return self._decompress(memoryview(block)[4:], int.from_bytes(block[:4], "big", signed=True))
