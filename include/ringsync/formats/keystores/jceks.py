"""Secret keys in a JCEKS keystore, the default in Cassandra's ``transparent_data_encryption_options``.

Layout (JDK: com.sun.crypto.provider.JceKeyStore, KeyProtector): magic, version, entries, and a SHA-1 of the password
and all bytes before. A secret key is a serialised Java object, sealed by PBEWithMD5AndTripleDES inside another one. No
maintained library reads it (pyjks: last release in 2020, needs twofish and pycryptodomex).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

from ringsync.formats.keystores.der import read_der
from ringsync.formats.keystores.java_objects import ByteReader, read_object
from ringsync.formats.keystores.passwords import KeystoreError, decrypt_cbc

MAGIC = bytes.fromhex("cececece")
JKS_MAGIC = bytes.fromhex("feedfeed")

_PRIVATE_KEY, _CERTIFICATE, _SECRET_KEY = 1, 2, 3
_DIGEST_BYTES = 20
_WHITENER = b"Mighty Aphrodite"


def jceks_keys(data: bytes, name: str, password: str, key_password: str) -> dict[str, Callable[[], bytes]]:
    """Read the secret keys of a JCEKS keystore.

    :param data: the whole file
    :param name: name of the file, for messages
    :returns: function that unseals each key, by alias; the JDK writes aliases in lower case. A call takes a quarter of
        a second, and raises KeystoreError if the key's password is wrong
    :raises KeystoreError: the file is damaged, or its password is wrong
    """
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if hashlib.sha1(password.encode("utf-16-be") + _WHITENER + body, usedforsecurity=False).digest() != digest:
        raise KeystoreError(f"{name}: the keystore's password is wrong, or the file is damaged")
    try:
        sealed = _sealed(ByteReader(body))
    except (ValueError, LookupError) as error:
        raise KeystoreError(f"{name}: not the layout of a JCEKS keystore: {error}") from error
    return {alias: partial(_unsealed, key, f"{name}: the key {alias}", key_password) for alias, key in sealed.items()}


def _sealed(reader: ByteReader) -> dict[str, dict[str, Any]]:
    """Read the sealed secret keys, as fields of Java objects by alias."""
    reader.take(len(MAGIC))
    version, count = reader.int32(), reader.int32()
    sealed = {}
    for _ in range(count):
        kind, alias, _created = reader.int32(), reader.text(), reader.take(8)
        if kind == _SECRET_KEY:
            sealed[alias] = read_object(reader)
        elif kind == _PRIVATE_KEY:
            reader.take(reader.int32())
            for _certificate in range(reader.int32()):
                _skip_certificate(reader, version)
        elif kind == _CERTIFICATE:
            _skip_certificate(reader, version)
        else:
            raise ValueError(f"an entry of kind {kind}")
    return sealed


def _skip_certificate(reader: ByteReader, version: int) -> None:
    if version > 1:
        reader.text()
    reader.take(reader.int32())


def _unsealed(sealed: dict[str, Any], what: str, password: str) -> bytes:
    """Return the key inside a javax.crypto.SealedObject."""
    if sealed.get("sealAlg") != "PBEWithMD5AndTripleDES":
        raise KeystoreError(f"{what} is sealed by {sealed.get('sealAlg')}, which is not known")
    if not password.isascii():
        raise KeystoreError(f"{what} cannot be decrypted: its password is wrong, since it has to be ASCII")
    try:
        _, (salt, rounds) = read_der(sealed["encodedParams"])
        key, vector = _derived(password, salt[1], int.from_bytes(rounds[1], "big"))
        content = decrypt_cbc("TripleDES", key, vector, sealed["encryptedContent"], what)
        secret = read_object(ByteReader(content))
    except KeystoreError:
        raise
    except (ValueError, LookupError, TypeError) as error:
        raise KeystoreError(f"{what} cannot be decrypted: its password is wrong, or it is damaged") from error
    if not isinstance(secret.get("key"), bytes):
        raise KeystoreError(f"{what} is no AES key")
    return bytes(secret["key"])


def _derived(password: str, salt: bytes, rounds: int) -> tuple[bytes, bytes]:
    """Derive key and initialisation vector by MD5 of each half of the salt (JDK: com.sun.crypto.provider.PBES1Core)."""
    derived, secret = b"", password.encode("ascii")
    for half in (salt[:4], salt[4:8]):
        for _ in range(rounds):
            half = hashlib.md5(half + secret, usedforsecurity=False).digest()
        derived += half
    return derived[:24], derived[24:]
