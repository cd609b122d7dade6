"""The keystore that a user names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ringsync.formats.keystores.errors import KeystoreError
from ringsync.formats.keystores.lookup import key_lookup

PASSWORD_VARIABLE, KEY_PASSWORD_VARIABLE = "RINGSYNC_KEYSTORE_PASSWORD", "RINGSYNC_KEY_PASSWORD"


def keys_in(path: str | Path, environment: Mapping[str, str]) -> Callable[[str], bytes]:
    """The keys in a keystore or key file, see :func:`~ringsync.formats.keystores.lookup.key_lookup`.

    :param environment: may have the keystore's password in RINGSYNC_KEYSTORE_PASSWORD, and the key's, if it has another
        one, in RINGSYNC_KEY_PASSWORD
    :raises KeystoreError: when the file cannot be read or used
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
        raise KeystoreError(f"{error} (a password is taken from the variable {PASSWORD_VARIABLE})") from None
