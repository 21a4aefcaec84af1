"""`kvstore certs`: a CA for a lab, and certificates of components by it.

    ca.crt  ca.key  node-NAME.crt  node-NAME.key  index-NAME.crt  …

The CA is made once and used again. Nothing is ever overwritten; keys can be read by their owner
only. The owner of ca.key can impersonate every component: a site with a CA of its own issues
certificates with the same names (`kvstore.client.tls`) and keeps its key where it keeps such keys.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvstore.client.tls import ANY_INDEX
from kvstore.config.defaults import CERTIFICATE_DAYS
from kvstore.errors import ConfigError
from kvstore.wire.identity import Identity, is_name

CA_DAYS: Final = 3650
_BACKDATED: Final = datetime.timedelta(hours=1)
"""Certificates are valid this long before they are made, as clocks of machines differ."""


def make_certificates(
    directory: Path,
    identities: Sequence[Identity],
    *,
    hosts: Sequence[str] = (),
    days: int = CERTIFICATE_DAYS,
    nodes_are_indexes: bool = False,
) -> list[Path]:
    """Certificates and keys of these components, by the CA in `directory`, which is made when there
    is none. Returns the files that were made.

    Args:
        directory: made when it is not there.
        identities: one certificate each.
        hosts: further DNS names and IP addresses in the certificates, for programs that do not
            check our names.
        days: validity of the certificates; ends with the CA at the latest.
        nodes_are_indexes: certificates of nodes are also those of an index replica inside them.

    Raises:
        ConfigError: a name cannot be one, a file is there already, or cannot be made.
    """
    for identity in identities:
        if not is_name(identity.name):
            raise ConfigError(
                f"{identity.name!r} cannot be a name: use lower-case letters, digits, '-' and '.'"
            )
    files = [directory / f"{identity.role}-{identity.name}.crt" for identity in identities]
    for file in (each for cert in files for each in (cert, cert.with_suffix(".key"))):
        if os.path.lexists(file) or files.count(file) > 1:
            raise ConfigError(f"{file} would be overwritten: remove it, or choose another name")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        ca, ca_key, made = _authority(directory)
        for identity, file in zip(identities, files, strict=True):
            names = _names(identity, hosts, is_index=nodes_are_indexes)
            made += _issue(file, names, ca, ca_key, days=days)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or directory} cannot be used: {error.strerror}; name a DIRECTORY"
            " that this user may read and write"
        ) from None
    return made


def _names(identity: Identity, hosts: Iterable[str], *, is_index: bool) -> list[x509.GeneralName]:
    names = [str(identity)]
    if identity.role == "node" and is_index:
        names.append(str(Identity("index", identity.name)))
    if identity.role == "index" or is_index:
        names.append(ANY_INDEX)
    general: list[x509.GeneralName] = [x509.DNSName(name) for name in names]
    for host in hosts:
        try:
            general.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            if not is_name(host) or host.endswith(".kvstore"):
                raise ConfigError(f"{host!r} is no host: give DNS names and IP addresses") from None
            general.append(x509.DNSName(host))
    return general


def _authority(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey, list[Path]]:
    cert_file, key_file = directory / "ca.crt", directory / "ca.key"
    if not any(map(os.path.lexists, (cert_file, key_file))):
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvstore lab CA")])
        usage = x509.KeyUsage(
            **dict.fromkeys(_USAGES, False) | {"key_cert_sign": True, "crl_sign": True}
        )
        cert = (
            _builder(name, name, key.public_key(), days=CA_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .sign(key, hashes.SHA256())
        )
        return cert, key, _write(cert_file, cert, key)
    try:
        cert = x509.load_pem_x509_certificate(cert_file.read_bytes())
        loaded = pem.load_pem_private_key(key_file.read_bytes(), password=None)
    except (FileNotFoundError, ValueError, TypeError) as error:
        raise ConfigError(
            f"the CA in {directory} cannot be used: {error}; restore ca.crt and ca.key, or begin"
            " in another directory"
        ) from None
    if not isinstance(loaded, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{key_file} was not made by 'kvstore certs': use another directory")
    return cert, loaded, []


_USAGES: Final = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
    *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


def _issue(
    file: Path,
    names: list[x509.GeneralName],
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
    *,
    days: int,
) -> list[Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, file.stem[:64])])
    purposes = x509.ExtendedKeyUsage(
        [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    )
    cert = (
        _builder(subject, ca.subject, key.public_key(), days=days, end=ca.not_valid_after_utc)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(purposes, critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False
        )
        .sign(ca_key, hashes.SHA256())
    )
    return _write(file, cert, key)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    *,
    days: int,
    end: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    now, lasting = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + lasting if end is None else min(now + lasting, end))
    )


def _write(file: Path, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> list[Path]:
    private = key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption())
    key_file = file.with_suffix(".key")
    _create(key_file, private, mode=0o600)
    _create(file, cert.public_bytes(pem.Encoding.PEM), mode=0o644)
    return [file, key_file]


def _create(file: Path, content: bytes, *, mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(file, flags, mode), "wb") as opened:
        opened.write(content)
