"""Addresses and rules of `kvstore pd-proxy`, checked before it starts.

Ways to be wrong, each a ConfigError that says how to mend it: an address or URL that is none; an
engine twice, or in both roles; HTTP without TLS beyond this machine, in either direction, without
--insecure; a certificate without its key, or one that cannot be read.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from kvstore.config.addresses import address_of, joined
from kvstore.errors import ConfigError

Legs = Literal["in-turn", "together"]
ENGINES_MAX: Final = 256
PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, kw_only=True)
class PdConfig:
    """The whole configuration of the proxy."""

    host: str
    port: int
    """0: the kernel chooses; the ready line has the port."""
    prefill: tuple[str, ...]
    """Base URLs of engines."""
    decode: tuple[str, ...]
    legs: Legs
    prefill_timeout_s: float
    server_tls: ssl.SSLContext | None
    client_tls: ssl.SSLContext | None
    """None: the CAs of the system."""


def pd_config(
    *,
    listen: str,
    prefill: Sequence[str],
    decode: Sequence[str],
    legs: Legs,
    prefill_timeout_s: float,
    cert: Path | None,
    key: Path | None,
    engine_ca: Path | None,
    insecure: bool,
) -> PdConfig:
    """Raises ConfigError."""
    found = address_of(listen)
    if found is None:
        raise ConfigError(f"--listen {listen!r} must be an IP address and a port: 127.0.0.1:8000")
    if (cert is None) != (key is None):
        raise ConfigError("--cert and --key go together: give both, or neither")
    address, port = found
    if not (address.is_loopback or cert or insecure):
        raise ConfigError(
            f"--listen {listen} is reached from other machines: give --cert and --key, listen on"
            " 127.0.0.1 behind a TLS proxy, or add --insecure in a lab"
        )
    prefill = _engines("--prefill", prefill, insecure=insecure)
    decode = _engines("--decode", decode, insecure=insecure)
    if both := set(map(_place, prefill)) & set(map(_place, decode)):
        raise ConfigError(
            f"--prefill and --decode both name the engine at {joined(*min(both))}: one engine"
            " for both needs no proxy; name two engines, or send clients to it directly"
        )
    return PdConfig(
        host=str(address),
        port=port,
        prefill=prefill,
        decode=decode,
        legs=legs,
        prefill_timeout_s=prefill_timeout_s,
        server_tls=_server_tls(cert, key),
        client_tls=_client_tls(engine_ca),
    )


def _engines(flag: str, urls: Sequence[str], *, insecure: bool) -> tuple[str, ...]:
    for url in urls:
        try:
            parts = urlsplit(url)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_url = False
        if not is_url or parts.path.strip("/") or parts.query or parts.fragment or parts.username:
            raise ConfigError(f"{flag} {url!r} must be like http://127.0.0.1:8100")
        if parts.scheme == "http" and not insecure and not _is_here(parts.hostname or ""):
            raise ConfigError(
                f"{flag} {url} sends prompts to another machine without TLS: use https://, or add"
                " --insecure in a lab"
            )
    if len(set(map(_place, urls))) != len(urls) or not 1 <= len(urls) <= ENGINES_MAX:
        raise ConfigError(f"{flag} names 1 to {ENGINES_MAX} engines, each once")
    return tuple(url.rstrip("/") for url in urls)


def _place(url: str) -> tuple[str, int]:
    """Host and port of the engine at this URL; two URLs may name one engine."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return "127.0.0.1" if host == "localhost" else host, parts.port or PORTS[parts.scheme]


def _is_here(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _server_tls(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"--cert {cert} with --key {key} cannot be used: {error.strerror or error}"
        ) from None
    return context


def _client_tls(ca: Path | None) -> ssl.SSLContext | None:
    try:
        return None if ca is None else ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ConfigError(f"--engine-ca {ca} cannot be used: {error.strerror or error}") from None
