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
from collections.abc import Iterable, Mapping, Sequence
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
        ca, made = _authority(directory)
        for identity, file in zip(identities, files, strict=True):
            names = _names(identity, hosts, is_index=nodes_are_indexes)
            uses = {x509.SubjectAlternativeName(names): False, _NO_CA: True, _PURPOSES: False}
            made += _issue(file, file.stem[:64], uses, days=days, by=ca)[1]
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


_USAGES: Final = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
    *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)
_SIGNS: Final = x509.KeyUsage(
    **dict.fromkeys(_USAGES, False) | {"key_cert_sign": True, "crl_sign": True}
)
_CA: Final = x509.BasicConstraints(ca=True, path_length=0)
_NO_CA: Final = x509.BasicConstraints(ca=False, path_length=None)
_PURPOSES: Final = x509.ExtendedKeyUsage(
    [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
)
_Signer = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]
"""A CA and its key."""


def _authority(directory: Path) -> tuple[_Signer, list[Path]]:
    """The CA in a directory, which is made if there is none, and the files that were made."""
    cert_file, key_file = directory / "ca.crt", directory / "ca.key"
    if not any(map(os.path.lexists, (cert_file, key_file))):
        return _issue(cert_file, "kvstore lab CA", {_CA: True, _SIGNS: True}, days=CA_DAYS)
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
    return (cert, loaded), []


def _issue(
    file: Path,
    name: str,
    extensions: Mapping[x509.ExtensionType, bool],
    *,
    days: int,
    by: _Signer | None = None,
) -> tuple[_Signer, list[Path]]:
    """A new key with its certificate, and their files.

    Args:
        file: of the certificate.
        name: its common name.
        extensions: each with whether it is critical.
        days: validity; ends with that of the CA at the latest.
        by: the CA; None: it is one, and signs itself.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    key_id: x509.ExtensionType = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    if by is not None:
        end = min(end, by[0].not_valid_after_utc)
        key_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(by[1].public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(by[0].subject if by else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(end)
    )
    for extension, is_critical in {**extensions, key_id: False}.items():
        builder = builder.add_extension(extension, is_critical)
    cert = builder.sign(by[1] if by else key, hashes.SHA256())
    private = key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption())
    key_file = file.with_suffix(".key")
    _create(key_file, private, mode=0o600)
    _create(file, cert.public_bytes(pem.Encoding.PEM), mode=0o644)
    return (cert, key), [file, key_file]


def _create(file: Path, content: bytes, *, mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(file, flags, mode), "wb") as opened:
        opened.write(content)
