"""Decryption and key derivation by the passwords of keystores."""

from __future__ import annotations

import hashlib

from cryptography.hazmat.decrepit.ciphers.algorithms import TripleDES
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.padding import PKCS7

_CIPHERS = {"AES": algorithms.AES, "TripleDES": TripleDES}


def decrypt_cbc(cipher: str, key: bytes, vector: bytes, content: bytes, what: str) -> bytes:
    """Decrypt and remove the padding.

    :param cipher: ``AES`` or ``TripleDES``
    :param what: name of what is decrypted, for the message
    :raises KeystoreError: the key is wrong
    """
    kind = _CIPHERS[cipher](key)
    decryptor = Cipher(kind, modes.CBC(vector)).decryptor()
    unpadder = PKCS7(kind.block_size).unpadder()
    try:
        plain = decryptor.update(content) + decryptor.finalize()
        return unpadder.update(plain) + unpadder.finalize()
    except ValueError as error:
        raise KeystoreError(f"{what} cannot be decrypted: its password is wrong") from error


def pkcs12_derived(password: str, salt: bytes, rounds: int, purpose: int, size: int) -> bytes:
    """Derive bytes of a key (purpose 1) or initialisation vector (2) by SHA-1 (RFC 7292, appendix B.2)."""
    block = 64

    def filled(content: bytes) -> bytes:
        length = -(-len(content) // block) * block
        return (content * (length // max(len(content), 1) + 1))[:length]

    mixed = filled(salt) + filled((password + "\0").encode("utf-16-be"))
    derived = b""
    while len(derived) < size:
        digest = bytes([purpose]) * block + mixed
        for _ in range(rounds):
            digest = hashlib.sha1(digest, usedforsecurity=False).digest()
        derived += digest
        added = int.from_bytes(filled(digest)[:block], "big") + 1
        mixed = b"".join(
            ((int.from_bytes(mixed[at : at + block], "big") + added) % (1 << 8 * block)).to_bytes(block, "big")
            for at in range(0, len(mixed), block)
        )
    return derived[:size]


class KeystoreError(ValueError):
    """An error: a keystore or key cannot be read. The message says why, what to do, and never a password or key."""
