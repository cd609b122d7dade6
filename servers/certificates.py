"""Certificates for TLS between a client and a server of this package: an authority, a server and a client."""

from __future__ import annotations

import datetime
import ipaddress
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509.oid import NameOID

VALID = datetime.timedelta(days=30)


@dataclass(frozen=True)
class Certificates:
    """
    The paths of the files.

    :param authority: PEM certificate of the authority that signed all others.
    :param keystore: PKCS12 with the server's key and certificate.
    :param truststore: PKCS12 with the authority's certificate.
    :param password: password of both stores.
    :param client_certificate: PEM certificate of the client.
    :param client_key: PEM key of the client, not encrypted.
    """

    authority: Path
    keystore: Path
    truststore: Path
    password: str = field(repr=False)
    client_certificate: Path
    client_key: Path


def make_certificates(folder: Path, addresses: tuple[str, ...] = ("127.0.0.1",)) -> Certificates:
    """
    Make certificates of an authority, a server for these addresses, and a client. They are valid for 30 days.

    :param folder: folder for the files; keys in it are readable by the owner only.
    :param addresses: IP addresses of the server.
    """
    folder.mkdir(parents=True, exist_ok=True)
    authority_key, server_key, client_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    authority = _certificate("ringsync test authority", authority_key, None, authority_key, ())
    server = _certificate("ringsync test server", server_key, authority, authority_key, addresses)
    client = _certificate("ringsync test client", client_key, authority, authority_key, ())
    password = secrets.token_urlsafe(16)
    encryption = serialization.BestAvailableEncryption(password.encode())
    made = Certificates(
        authority=folder / "authority.pem",
        keystore=folder / "server.p12",
        truststore=folder / "trust.p12",
        password=password,
        client_certificate=folder / "client.pem",
        client_key=folder / "client.key",
    )
    pem = serialization.Encoding.PEM
    plain = (pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    trusted = [pkcs12.PKCS12Certificate(authority, b"authority")]
    _write(made.authority, authority.public_bytes(pem))
    _write(made.keystore, pkcs12.serialize_key_and_certificates(b"server", server_key, server, [authority], encryption))
    _write(made.truststore, pkcs12.serialize_java_truststore(trusted, encryption))
    _write(made.client_certificate, client.public_bytes(pem))
    _write(made.client_key, client_key.private_bytes(*plain))
    return made


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    issuer_key: ec.EllipticCurvePrivateKey,
    addresses: tuple[str, ...],
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + VALID)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if addresses:
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address)) for address in addresses])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _write(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)
