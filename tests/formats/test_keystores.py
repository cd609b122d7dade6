"""Tests of keys from keystores of the JDK's own tools, and from text. No message has secrets."""

from __future__ import annotations

import base64
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsync.formats.keystores.lookup import key_lookup
from ringsync.formats.keystores.passwords import KeystoreError
from servers.java import find_java_home
from tests.commitlogs.fixtures import KEYSTORES, Keystore

STORE, KEY = "store-of-tests", "key-of-tests"
_PRINT = """
var store = java.security.KeyStore.getInstance("{kind}");
store.load(new java.io.FileInputStream("{path}"), "{store}".toCharArray());
for (var alias : new String[] {{{aliases}}}) {{
    var key = store.getKey(alias, "{key}".toCharArray()).getEncoded();
    System.out.println(String.format("%0" + 2 * key.length + "x", new java.math.BigInteger(1, key)));
}}
"""


@dataclass(frozen=True)
class Made:
    """Make keystores with the JDK's keytool, and list their keys by Java."""

    folder: Path
    jceks: list[str]
    legacy: list[str]

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("keystores")
    binaries = find_java_home() / "bin"

    def keytool(action: str, name: str, kind: str, key: str, *options: str) -> None:
        store = ["-keystore", str(folder / name), "-storetype", kind, "-storepass", STORE, "-keypass", key]
        command = [str(binaries / "keytool"), "-J-Dkeystore.pkcs12.legacy=true", action, *store, *options]
        subprocess.run(command, check=True, capture_output=True)

    def print_keys(name: str, kind: str, key: str, *aliases: str) -> str:
        quoted = ", ".join(f'"{alias}"' for alias in aliases)
        return _PRINT.format(kind=kind, path=folder / name, store=STORE, key=key, aliases=quoted)

    pair = ["-keyalg", "RSA", "-alias", "pair", "-dname", "CN=test"]
    keytool("-genkeypair", "many.jceks", "JCEKS", KEY, *pair)
    keytool("-genseckey", "many.jceks", "JCEKS", KEY, "-keyalg", "AES", "-keysize", "192", "-alias", "Mixed:Case")
    keytool("-genseckey", "many.jceks", "JCEKS", KEY, "-keyalg", "AES", "-keysize", "256", "-alias", "two")
    keytool("-genkeypair", "legacy.p12", "PKCS12", STORE, *pair)
    keytool("-genseckey", "legacy.p12", "PKCS12", STORE, "-keyalg", "AES", "-keysize", "128", "-alias", "old")
    keytool("-genkeypair", "pair.jks", "JKS", STORE, *pair)
    keytool("-genkeypair", "pair.p12", "PKCS12", STORE, *pair)
    script = print_keys("many.jceks", "JCEKS", KEY, "mixed:case", "two")
    script += print_keys("legacy.p12", "PKCS12", STORE, "old")
    shell = [str(binaries / "jshell"), "-s", "-"]
    printed = subprocess.run(shell, input=script, check=True, capture_output=True, text=True).stdout.split()
    return Made(folder, printed[:2], printed[2:])


@pytest.mark.parametrize("keystore", KEYSTORES.values(), ids=lambda one: one.store_type)
def test_keys_that_cassandra_used(keystore: Keystore) -> None:
    key_of = key_lookup(keystore.path.read_bytes(), "store", keystore.store_password, keystore.key_password)
    assert key_of(keystore.key_alias).hex() == keystore.key_file.read_text().strip()


def test_a_jceks_keystore_of_several_entries(made: Made) -> None:
    key_of = key_lookup(made.read("many.jceks"), "many.jceks", STORE, KEY)
    assert [key_of(alias).hex() for alias in ("Mixed:Case", "two")] == made.jceks
    with pytest.raises(KeystoreError, match=r"many\.jceks: there is no key other, only mixed:case, two; is it the"):
        key_of("other")


def test_a_pkcs12_keystore_of_an_old_jdk(made: Made) -> None:
    key_of = key_lookup(made.read("legacy.p12"), "legacy.p12", STORE)
    assert key_of("OLD").hex() == made.legacy[0]
    key_of = key_lookup(made.read("legacy.p12"), "legacy.p12", "wrong")
    with pytest.raises(KeystoreError, match=r"^legacy\.p12: the key old cannot be decrypted: its password is wrong"):
        key_of("old")


def test_keystores_without_secret_keys(made: Made) -> None:
    with pytest.raises(KeystoreError, match=r"pair\.jks: a keystore of type JKS, which cannot hold secret keys"):
        key_lookup(made.read("pair.jks"), "pair.jks", STORE)
    key_of = key_lookup(made.read("pair.p12"), "pair.p12", STORE)
    with pytest.raises(KeystoreError, match=r"pair\.p12: there is no key k, no secret key at all"):
        key_of("k")


@pytest.mark.parametrize("keystore", KEYSTORES.values(), ids=lambda one: one.store_type)
def test_wrong_passwords(keystore: Keystore) -> None:
    data = keystore.path.read_bytes()
    with pytest.raises(KeystoreError, match=r"^store: a keystore, and no password for it was given$"):
        key_lookup(data, "store")
    with pytest.raises(KeystoreError) as raised:
        key_lookup(data, "store", keystore.store_password, "wröng")(keystore.key_alias)
    assert "its password is wrong" in str(raised.value)
    for secret in (keystore.store_password, keystore.key_password, "wröng", keystore.key_file.read_text().strip()):
        assert secret not in str(raised.value)


def test_a_wrong_password_of_a_jceks_keystore() -> None:
    keystore = KEYSTORES["jceks"]
    with pytest.raises(KeystoreError, match=r"^store: the keystore's password is wrong, or the file is damaged$"):
        key_lookup(keystore.path.read_bytes(), "store", "wrong", keystore.key_password)


@pytest.mark.parametrize("size", [16, 24, 32])
def test_a_key_as_text_serves_every_alias(size: int) -> None:
    key = bytes(range(200, 200 + size))
    body = base64.b64encode(key)
    pem = b"-----BEGIN AES KEY-----\n" + body[:20] + b"\n" + body[20:] + b"\n-----END AES KEY-----\n"
    for text in (key.hex().encode(), key.hex().upper().encode() + b"\n", body, body + b"\r\n", pem):
        assert key_lookup(text, "key.txt")("any") == key


@pytest.mark.parametrize("data", [b"", b"0011", b"not a key", bytes(20), b"-----BEGIN X-----\nAAAA\n-----END X-----\n"])
def test_what_is_no_key(data: bytes) -> None:
    with pytest.raises(KeystoreError, match=r"key\.txt: neither a keystore \(JCEKS, PKCS12\) nor the text of one AES"):
        key_lookup(data, "key.txt")


def test_elements_nested_without_end_are_refused() -> None:
    data = b"\x30\x00"
    for _ in range(5000):
        data = b"\x30\x84" + len(data).to_bytes(4, "big") + data
    with pytest.raises(KeystoreError, match="store: not the layout of a PKCS12 keystore"):
        key_lookup(data, "store", "password")


@given(st.data())
def test_damaged_keystores_are_refused(data: st.DataObject) -> None:
    keystore = data.draw(st.sampled_from(list(KEYSTORES.values())))
    content = bytearray(keystore.path.read_bytes())
    at = data.draw(st.integers(1, len(content) - 1))
    if data.draw(st.booleans()):
        del content[at:]
    else:
        content[at] ^= data.draw(st.integers(1, 255))
    try:
        key = key_lookup(bytes(content), "store", keystore.store_password, keystore.key_password)(keystore.key_alias)
    except KeystoreError:
        return
    # PKCS12's own checksum is not looked at: a damage beside the key does no harm.
    assert keystore.store_type == "PKCS12"
    assert len(key) in (16, 24, 32) or key.hex() == keystore.key_file.read_text().strip()
