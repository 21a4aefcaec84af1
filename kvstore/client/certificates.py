"""The three files of a component, read and judged.

Covers: their contents as a `Tls`. Does not cover: its use (`kvstore.client.tls`), making
certificates (`kvstore.cli.certs`).

Ways for the files to be wrong, each a ConfigError of one sentence: missing, not readable, no PEM;
a certificate that is expired, not valid yet, of another key, or not issued by the given CA.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

from kvstore.client.tls import Tls, TlsFiles
from kvstore.errors import ConfigError
from kvstore.wire.identity import identities_of

PEM_BYTES_MAX: Final = 1 << 20


def load(files: TlsFiles) -> Tls:
    """Read and check the three files of a component. Raises ConfigError."""
    ca, authorities = _pem("--ca", files.ca)
    cert, chain, key = _pair("--cert", files.cert, "--key", files.key)
    own = chain[0]
    _refuse_wrong_time("--ca", files.ca, authorities[0])
    if not any(_is_issued_by(own, issuer) for issuer in (*chain[1:], *authorities)):
        raise ConfigError(
            f"--cert {files.cert} was not issued by --ca {files.ca}: all components need"
            " certificates of one CA, such as 'kvstore certs' makes"
        )
    return _tls(ca, cert, key, own)


def load_listening(cert_path: Path, key_path: Path, *, ca_path: Path | None) -> Tls:
    """Certificate of a server for clients beyond the cluster, of any CA. `ca_path`: that of the
    certificates of its clients, if they show any. Raises ConfigError."""
    ca = _pem("--listen-ca", ca_path)[0] if ca_path else b""
    cert, chain, key = _pair("--listen-cert", cert_path, "--listen-key", key_path)
    return _tls(ca, cert, key, chain[0])


def _tls(ca: bytes, cert: bytes, key: bytes, own: x509.Certificate) -> Tls:
    ends_s = int(own.not_valid_after_utc.timestamp())
    return Tls(ca, cert, key, identities_of(_names(own)), ends_s)


def _pair(
    cert_option: str, cert_path: Path, key_option: str, key_path: Path
) -> tuple[bytes, Sequence[x509.Certificate], bytes]:
    """(certificates in PEM form, parsed, key in PEM form)."""
    cert, chain = _pem(cert_option, cert_path)
    key = _read(key_option, key_path)
    if _public(_key(key_option, key_path, key)) != _public(chain[0]):
        raise ConfigError(
            f"{key_option} {key_path} is not the key of {cert_option} {cert_path}: give a"
            " matching pair"
        )
    _refuse_wrong_time(cert_option, cert_path, chain[0])
    return cert, chain, key


def _pem(option: str, path: Path) -> tuple[bytes, Sequence[x509.Certificate]]:
    pem = _read(option, path)
    try:
        return pem, x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise ConfigError(f"{option} {path} is no certificate in PEM form") from None


def _read(option: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(PEM_BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be read: {error.strerror}") from None


def _key(option: str, path: Path, pem: bytes) -> PrivateKeyTypes:
    try:
        return serialization.load_pem_private_key(pem, password=None)
    except TypeError:
        raise ConfigError(f"{option} {path} needs a password: give one without") from None
    except ValueError:
        raise ConfigError(f"{option} {path} is no private key in PEM form") from None


def _public(owner: x509.Certificate | PrivateKeyTypes) -> bytes:
    return owner.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _refuse_wrong_time(option: str, path: Path, certificate: x509.Certificate) -> None:
    now = _now()
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end:
        raise ConfigError(f"{option} {path} expired at {end:%Y-%m-%d %H:%M} UTC: make a new one")
    if now < begin:
        raise ConfigError(
            f"{option} {path} is valid from {begin:%Y-%m-%d %H:%M} UTC only: look at the clock of"
            " this machine, or make a new one"
        )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _is_issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _names(certificate: x509.Certificate) -> list[tuple[str, str]]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [("DNS", name) for name in names.get_values_for_type(x509.DNSName)]
