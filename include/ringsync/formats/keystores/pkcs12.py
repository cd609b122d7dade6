"""Secret keys in a PKCS12 keystore, the JDK's default since Java 9 (RFC 7292; JDK: PKCS12KeyStore).

Secret keys are in bags of a kind that libraries for certificates, such as ``cryptography``, ignore.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial

from ringsync.formats.keystores.der import SEQUENCE, Der, dotted, read_der
from ringsync.formats.keystores.passwords import KeystoreError, decrypt_cbc, pkcs12_derived

_DATA = "1.2.840.113549.1.7.1"
_SECRET_BAG = "1.2.840.113549.1.12.10.1.5"
_FRIENDLY_NAME = "1.2.840.113549.1.9.20"
_PBES2 = "1.2.840.113549.1.5.13"
_SHA1_AND_TRIPLE_DES = "1.2.840.113549.1.12.1.3"
_HASHES = {
    "1.2.840.113549.2.7": "sha1",
    "1.2.840.113549.2.8": "sha224",
    "1.2.840.113549.2.9": "sha256",
    "1.2.840.113549.2.10": "sha384",
    "1.2.840.113549.2.11": "sha512",
}
_AES_CBC = {"2.16.840.1.101.3.4.1.2": 16, "2.16.840.1.101.3.4.1.22": 24, "2.16.840.1.101.3.4.1.42": 32}
"""Bytes of the key of each cipher."""


def pkcs12_keys(data: bytes, name: str, password: str) -> dict[str, Callable[[], bytes]]:
    """Read the secret keys of a PKCS12 keystore.

    :param data: the whole file
    :param name: name of the file, for messages
    :param password: password of both keystore and keys: PKCS12 has only one
    :returns: function that decrypts each key, by alias; the JDK writes aliases in lower case. A call raises
        KeystoreError if the password is wrong
    :raises KeystoreError: the file is damaged
    """
    try:
        _, (_version, (_, (_, (_, ((_, safes),)))), *_mac) = read_der(data)
        keys: dict[str, Callable[[], bytes]] = {}
        for _, (kind, *content) in read_der(safes)[1]:
            if dotted(kind[1]) == _DATA:
                (_, ((_, bags),)) = content[0]
                for _, bag in read_der(bags)[1]:
                    keys.update(_secret(bag, name, password))
        return keys
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise KeystoreError(f"{name}: not the layout of a PKCS12 keystore: {error}") from error


def _secret(bag: list[Der], name: str, password: str) -> dict[str, Callable[[], bytes]]:
    """Read the key in a bag, if the bag holds a secret key."""
    (_, kind), (_, value), *attributes = bag
    if dotted(kind) != _SECRET_BAG:
        return {}
    alias = ""
    for _, ((_, attribute), (_, values)) in attributes[0][1] if attributes else []:
        if dotted(attribute) == _FRIENDLY_NAME:
            alias = values[0][1].decode("utf-16-be")
    (_, (_, (_, ((_, encrypted),)))) = value[0]
    _, ((_, scheme), (_, content)) = read_der(encrypted)
    return {alias: partial(_key, scheme, content, password, f"{name}: the key {alias}")}


def _key(scheme: list[Der], content: bytes, password: str, what: str) -> bytes:
    try:
        _, (_version, _algorithm, (_, key)) = read_der(_decrypted(scheme, content, password, what))
    except KeystoreError:
        raise
    except (ValueError, LookupError, TypeError) as error:
        raise KeystoreError(f"{what} cannot be decrypted: its password is wrong, or it is damaged") from error
    return bytes(key)


def _decrypted(scheme: list[Der], content: bytes, password: str, what: str) -> bytes:
    (_, kind), (_, parameters) = scheme
    if dotted(kind) == _SHA1_AND_TRIPLE_DES:
        salt, rounds = parameters[0][1], int.from_bytes(parameters[1][1], "big")
        key, vector = (pkcs12_derived(password, salt, rounds, purpose, size) for purpose, size in ((1, 24), (2, 8)))
        return decrypt_cbc("TripleDES", key, vector, content, what)
    if dotted(kind) != _PBES2:
        raise KeystoreError(f"{what} is encrypted by the scheme {dotted(kind)}, which is not known")
    (_, (_, (_, derivation))), (_, ((_, cipher), (_, vector))) = parameters
    salt, rounds = derivation[0][1], int.from_bytes(derivation[1][1], "big")
    hashed = [dotted(element[0][1]) for tag, element in derivation[2:] if tag == SEQUENCE]
    digest, size = _HASHES.get(hashed[0] if hashed else "1.2.840.113549.2.7"), _AES_CBC.get(dotted(cipher))
    if digest is None or size is None:
        raise KeystoreError(f"{what} is encrypted by the cipher {dotted(cipher)}, which is not known")
    key = hashlib.pbkdf2_hmac(digest, password.encode(), salt, rounds, size)
    return decrypt_cbc("AES", key, vector, content, what)
