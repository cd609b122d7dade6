"""Secret keys in a JCEKS keystore, which Cassandra's ``transparent_data_encryption_options`` name by default.

Layout (JDK: com.sun.crypto.provider.JceKeyStore, KeyProtector): magic, version, entries, and a SHA-1 of password and
all before. A secret key is a Java object, sealed by PBEWithMD5AndTripleDES: a serialised object inside of another.
There is no library for it that is kept up (pyjks: last release in 2020, needs twofish and pycryptodomex).
"""

from __future__ import annotations

import hashlib
from typing import Any

from ringsync.formats.keystores.der import read_der
from ringsync.formats.keystores.errors import KeystoreError
from ringsync.formats.keystores.java_objects import ByteReader, read_object
from ringsync.formats.keystores.passwords import decrypt_cbc

MAGIC = bytes.fromhex("cececece")
JKS_MAGIC = bytes.fromhex("feedfeed")

_PRIVATE_KEY, _CERTIFICATE, _SECRET_KEY = 1, 2, 3
_DIGEST_BYTES = 20
_WHITENER = b"Mighty Aphrodite"


def jceks_keys(data: bytes, name: str, password: str, key_password: str) -> dict[str, bytes]:
    """Read the secret keys of a JCEKS keystore.

    :param data: the whole file
    :param name: of the file, for messages
    :param password: of the keystore
    :param key_password: of the keys
    :returns: keys by alias; the JDK has written the aliases in lower case
    :raises KeystoreError: when the file is damaged, or a password is wrong
    """
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if hashlib.sha1(password.encode("utf-16-be") + _WHITENER + body, usedforsecurity=False).digest() != digest:
        raise KeystoreError(f"{name}: the keystore's password is wrong, or the file is damaged")
    try:
        return _entries(ByteReader(body), key_password)
    except KeystoreError as error:
        raise KeystoreError(f"{name}: {error}") from error
    except (ValueError, LookupError) as error:
        raise KeystoreError(f"{name}: not the layout of a JCEKS keystore: {error}") from error


def _entries(reader: ByteReader, key_password: str) -> dict[str, bytes]:
    reader.take(len(MAGIC))
    version, count = reader.int32(), reader.int32()
    found = {}
    for _ in range(count):
        kind, alias, _created = reader.int32(), reader.text(), reader.take(8)
        if kind == _SECRET_KEY:
            found[alias] = _unsealed(read_object(reader), alias, key_password)
        elif kind == _PRIVATE_KEY:
            reader.take(reader.int32())
            for _certificate in range(reader.int32()):
                _skip_certificate(reader, version)
        elif kind == _CERTIFICATE:
            _skip_certificate(reader, version)
        else:
            raise ValueError(f"an entry of kind {kind}")
    return found


def _skip_certificate(reader: ByteReader, version: int) -> None:
    if version > 1:
        reader.text()
    reader.take(reader.int32())


def _unsealed(sealed: dict[str, Any], alias: str, password: str) -> bytes:
    """The key inside of a javax.crypto.SealedObject."""
    if sealed["sealAlg"] != "PBEWithMD5AndTripleDES":
        raise KeystoreError(f"the key {alias} is sealed by {sealed['sealAlg']}, which is not known")
    _, (salt, rounds) = read_der(sealed["encodedParams"])
    key, vector = _derived(password, salt[1], int.from_bytes(rounds[1], "big"))
    content = decrypt_cbc("TripleDES", key, vector, sealed["encryptedContent"], f"the key {alias}")
    secret = read_object(ByteReader(content))
    if not isinstance(secret.get("key"), bytes):
        raise KeystoreError(f"the key {alias} is no AES key")
    return bytes(secret["key"])


def _derived(password: str, salt: bytes, rounds: int) -> tuple[bytes, bytes]:
    """Key and initialisation vector (JDK: com.sun.crypto.provider.PBES1Core): MD5 of each half of the salt."""
    derived = b""
    for half in (salt[:4], salt[4:8]):
        for _ in range(rounds):
            half = hashlib.md5(half + password.encode("ascii"), usedforsecurity=False).digest()
        derived += half
    return derived[:24], derived[24:]
