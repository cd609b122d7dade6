"""What keystores do with passwords."""

from __future__ import annotations

import hashlib

from cryptography.hazmat.decrepit.ciphers.algorithms import TripleDES
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.padding import PKCS7

_CIPHERS = {"AES": algorithms.AES, "TripleDES": TripleDES}


def decrypt_cbc(cipher: str, key: bytes, vector: bytes, content: bytes, what: str) -> bytes:
    """Decrypt and remove the padding.

    :param cipher: ``AES`` or ``TripleDES``
    :param what: is decrypted, for the message
    :raises KeystoreError: when the key is wrong
    """
    kind = _CIPHERS[cipher](key)
    decryptor = Cipher(kind, modes.CBC(vector)).decryptor()
    unpadder = PKCS7(kind.block_size).unpadder()
    try:
        found = decryptor.update(content) + decryptor.finalize()
        return unpadder.update(found) + unpadder.finalize()
    except ValueError as error:
        raise KeystoreError(f"{what} cannot be decrypted: its password is wrong") from error


def pkcs12_derived(password: str, salt: bytes, rounds: int, purpose: int, size: int) -> bytes:
    """Bytes of a key (purpose 1) or initialisation vector (2) by SHA-1 (RFC 7292, appendix B.2)."""
    block = 64

    def filled(content: bytes) -> bytes:
        length = -(-len(content) // block) * block
        return (content * (length // max(len(content), 1) + 1))[:length]

    mixed = filled(salt) + filled((password + "\0").encode("utf-16-be"))
    found = b""
    while len(found) < size:
        digest = bytes([purpose]) * block + mixed
        for _ in range(rounds):
            digest = hashlib.sha1(digest, usedforsecurity=False).digest()
        found += digest
        added = int.from_bytes(filled(digest)[:block], "big") + 1
        mixed = b"".join(
            ((int.from_bytes(mixed[at : at + block], "big") + added) % (1 << 8 * block)).to_bytes(block, "big")
            for at in range(0, len(mixed), block)
        )
    return found[:size]


class KeystoreError(ValueError):
    """A keystore or key cannot be read; the message says why and what to do, and never holds a password or key."""
