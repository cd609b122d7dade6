"""Encrypted sections of a commit log: blocks that are compressed, then encrypted one by one.

See docs/formats.md, 1.3; C: security/EncryptionUtils, db/commitlog/EncryptedFileSegmentInputStream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.padding import PKCS7

from ringsync.formats.compression import BlockError, decompressor

CIPHER = "AES/CBC/PKCS5Padding"
"""Cassandra's default cipher."""
_HEADER = 8
"""Bytes before a block: its encrypted length and its plain length."""
_decompress = decompressor("LZ4Compressor")


def decryptor(parameters: dict[str, Any], key_of: Callable[[str], bytes] | None) -> Callable[[memoryview, int], bytes]:
    """Return a function (section without its length, length of the result in bytes) → the section's records.

    :param parameters: parameters of the segment's descriptor
    :param key_of: function from alias to AES key
    :raises ValueError: the key is missing, or the cipher is unknown
    """
    name, alias = str(parameters["encCipher"]), str(parameters.get("encKeyAlias"))
    if name != CIPHER:
        raise ValueError(f"encrypted by {name}, which is not known; known is {CIPHER}")
    if key_of is None:
        raise ValueError(f"encrypted by the key {alias}, and no keystore or key was given")
    algorithm = algorithms.AES(key_of(alias))
    mode = modes.CBC(bytes.fromhex(str(parameters.get("encIV"))))
    mode.validate_for_algorithm(algorithm)
    cipher = Cipher(algorithm, mode)

    def section(content: memoryview, length: int) -> bytes:
        """Decrypt and join all blocks of a section, because a mutation may begin in one block and end in the next."""
        parts = []
        position = 0
        while position < len(content):
            header = content[position : position + _HEADER]
            encrypted, plain = (int.from_bytes(header[at : at + 4], "big", signed=True) for at in (0, 4))
            position += _HEADER
            if len(header) < _HEADER or not 0 <= encrypted <= len(content) - position:
                raise BlockError(f"an encrypted block claims {encrypted} bytes and is cut off")
            parts.append(_block(cipher, alias, content[position : position + encrypted], plain))
            position += encrypted
        records = b"".join(parts)
        if len(records) != length:
            raise BlockError(f"{len(parts)} encrypted blocks hold {len(records)} bytes instead of {length}")
        return records

    return section


def _block(cipher: Cipher[modes.CBC], alias: str, encrypted: memoryview, plain: int) -> bytes:
    decryptor, unpadder = cipher.decryptor(), PKCS7(128).unpadder()
    try:
        padded = decryptor.update(encrypted) + decryptor.finalize()
        block = unpadder.update(padded) + unpadder.finalize()
    except ValueError as error:
        raise BlockError(
            f"{len(encrypted)} bytes cannot be decrypted: they are damaged, or the key given for {alias} is not the "
            "one that encrypted them"
        ) from error
    if len(block) != plain or plain < 4:
        raise BlockError(f"an encrypted block has {len(block)} bytes instead of {plain}")
    return _decompress(memoryview(block)[4:], int.from_bytes(block[:4], "big", signed=True))
