"""Lookup of the AES key of an alias, in a keystore or a key file.

Cassandra takes keys from Java keystores only (C: security/JKSKeyProvider). Their ``store_type`` in cassandra.yaml is
usually JCEKS; PKCS12 works, too; JKS cannot hold secret keys. Instead of a keystore an operator may give the key alone:
as hexadecimal or base64 text, or as base64 between PEM's lines.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from ringsync.formats.keystores import KEY_PASSWORD_VARIABLE, PASSWORD_VARIABLE
from ringsync.formats.keystores.jceks import JKS_MAGIC, MAGIC, jceks_keys
from ringsync.formats.keystores.passwords import KeystoreError
from ringsync.formats.keystores.pkcs12 import pkcs12_keys

_AES_BYTES = (16, 24, 32)
_PEM = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----\s(.*?)-----END \1-----", re.DOTALL)
_DER_SEQUENCE = b"\x30"


def key_lookup(
    data: bytes, name: str, password: str | None = None, key_password: str | None = None
) -> Callable[[str], bytes]:
    """Return a function from alias to AES key, for :func:`~ringsync.formats.commitlog.reader.read_log`.

    :param data: the whole file: a keystore (JCEKS, PKCS12), or the text of one key, which then serves all aliases
    :param name: name of the file, for messages
    :param password: password of the keystore; from the environment or a file, never from a command line
    :param key_password: password of the keys; None: the keystore's
    :raises KeystoreError: the file is of another kind or damaged, or a password is missing or wrong
    """
    if data.startswith(JKS_MAGIC):
        raise KeystoreError(
            f"{name}: a keystore of type JKS, which cannot hold secret keys: give the keystore that cassandra.yaml "
            "names (transparent_data_encryption_options, keystore)"
        )
    is_jceks, is_text = data.startswith(MAGIC), all(byte in b"\t\n\r" or 0x20 <= byte < 0x7F for byte in data)
    if is_text or not (is_jceks or data.startswith(_DER_SEQUENCE)):
        key = _key_of_text(data, name)
        return lambda _alias: key
    if password is None:
        raise KeystoreError(f"{name}: a keystore, and no password for it was given")
    if is_jceks:
        return _found_in(jceks_keys(data, name, password, key_password or password), name)
    return _found_in(pkcs12_keys(data, name, key_password or password), name)


def _found_in(keys: dict[str, Callable[[], bytes]], name: str) -> Callable[[str], bytes]:
    by_alias = {alias.lower(): key for alias, key in keys.items()}

    @cache
    def find(alias: str) -> bytes:
        if alias.lower() not in by_alias:
            others = f"only {', '.join(sorted(keys))}" if keys else "no secret key at all"
            raise KeystoreError(f"{name}: there is no key {alias}, {others}; is it the keystore of this node?")
        return by_alias[alias.lower()]()

    return find


def _key_of_text(data: bytes, name: str) -> bytes:
    pem = _PEM.search(data)
    text = b"".join((pem[2] if pem else data).split())
    try:
        # Hexadecimal first, because 32 hexadecimal digits are also valid base64 of 24 bytes.
        is_hex = not pem and re.fullmatch(rb"[0-9A-Fa-f]+", text) and len(text) // 2 in _AES_BYTES
        key = bytes.fromhex(text.decode()) if is_hex else base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        key = b""
    if len(key) not in _AES_BYTES:
        raise KeystoreError(
            f"{name}: neither a keystore (JCEKS, PKCS12) nor the text of one AES key of 16, 24 or 32 bytes "
            "(hexadecimal, base64, or PEM)"
        )
    return key


def keys_in(path: str | Path, environment: Mapping[str, str]) -> Callable[[str], bytes]:
    """Read a keystore or key file, see :func:`~ringsync.formats.keystores.lookup.key_lookup`.

    :param environment: environment variables: RINGSYNC_KEYSTORE_PASSWORD is the keystore's password,
        RINGSYNC_KEY_PASSWORD the keys', if it is another one
    :raises KeystoreError: the file cannot be read or used
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise KeystoreError(f"{path}: {error.strerror}") from error
    if PASSWORD_VARIABLE in environment:
        return key_lookup(data, str(path), environment[PASSWORD_VARIABLE], environment.get(KEY_PASSWORD_VARIABLE))
    try:
        return key_lookup(data, str(path))
    except KeystoreError as error:
        raise KeystoreError(f"{error} (the password comes from the variable {PASSWORD_VARIABLE})") from None
