"""Values as operators write them: each form is parsed, bounded and refused here, once.

    Form("ADDR", str, …)  ─▶  a field of `settings`  ─▶  `reading` calls `parse(key, text)`

Imports little, since all forms are made whenever a command starts. Does not cover: values that
other settings or the machine bound (`node`, `cluster`, `router`).
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from kvstore.client.tls import PORT_MAX, address_parts
from kvstore.config.defaults import DEFAULT_LISTEN, DEFAULT_METRICS, DEFAULT_SOCKET
from kvstore.errors import ConfigError
from kvstore.units import parse_size

UID_MAX: Final = (1 << 32) - 2
SOCKET_PATH_BYTES_MAX: Final = 107 - len(".lock")
"""The kernel's limit for a unix socket path, less the longest suffix we add."""
INDEX_COUNT_MAX: Final = 16
BODY_BYTES_MIN: Final = 1 << 10
BODY_BYTES_MAX: Final = 1 << 30
RECEIPT_BYTES: Final = 256 << 20


class Form(NamedTuple):
    """Form of a value in flags and YAML."""

    metavar: str
    """Name of the value in help texts."""
    kind: Any = None
    """Type of the value in YAML; None: the annotation of the field."""
    parse: Callable[[str, Any], Any] = lambda _key, value: value
    """(key of a setting, value as written) → parsed value. Raises ConfigError: one sentence."""
    absent: Any = None
    """The value when nothing was written."""


class HostPort(NamedTuple):
    """An IP address and a port."""

    host: str
    port: int
    """Port; 0 to listen on: the kernel chooses, and the ready line has it."""

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return ipaddress.ip_address(self.host).is_loopback

    @property
    def is_unspecified(self) -> bool:
        """Whether it stands for every address of a machine."""
        return ipaddress.ip_address(self.host).is_unspecified


# ── addresses ────────────────────────────────────────────────────────────────────────────────────


def address_of(text: str) -> HostPort | None:
    """IP address and port of HOST:PORT; None: the text is none.

    [::1]:9464, or ::1:9464, as Kubernetes makes it of $(POD_IP):9464: the last colon is the port's.
    """
    host, colon, port = text.rpartition(":")
    in_brackets = host[:1] == "[" and host[-1:] == "]"
    if in_brackets:
        host = host[1:-1]
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > PORT_MAX:
        return None
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return None
    return None if in_brackets and address.version == 4 else HostPort(str(address), int(port))


def joined(host: str, port: int | str) -> str:
    """HOST:PORT, an IPv6 address in brackets; for people and for parsers."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listening(example: str, key: str, text: str) -> HostPort:
    if found := address_of(text):
        return found
    raise ConfigError(f"--{key} {text!r} must be an IP address and a port, such as {example}")


def _reachable(key: str, text: str) -> HostPort | None:
    """Address where other nodes reach this one; None: empty, as a template may leave the text."""
    if not text:
        return None
    found = address_of(text)
    if found is None or found.is_unspecified:
        raise ConfigError(
            f"{key} {text!r} must be the IP address and port where other nodes reach this one,"
            " such as 10.0.0.7:9480"
        )
    return found


def _pages(key: str, text: str | int | bool) -> HostPort | None:
    """Address of /metrics and the other pages; None: no pages."""
    if text is False or text == "off":  # YAML reads a bare off as false
        return None
    if found := address_of(str(text)):
        return found
    example = f"127.0.0.1:{text}" if str(text).isdigit() else DEFAULT_METRICS
    raise ConfigError(f"{key} {text!r} must be an IP address and a port: {example}, or off")


def _servers(what: str, most: int | None, _key: str, given: Sequence[str] | str) -> tuple[str, ...]:
    """HOST:PORT of each server, where HOST may be a name. Raises ConfigError: more than `most`, or
    one twice.
    """
    texts = ((given,) if given else ()) if isinstance(given, str) else tuple(given)
    if most and (len(texts) > most or len(set(texts)) != len(texts)):
        raise ConfigError(f"{what} names up to {most} replicas, each once")
    for text in texts:
        address_parts(text, what=what)
    return texts


# ── sizes, files, users ──────────────────────────────────────────────────────────────────────────


def size_of(key: str, text: str | int) -> int:
    """Bytes of a size. Raises ConfigError."""
    try:
        return parse_size(str(text))
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None


def _body_size(key: str, text: str | int) -> int:
    try:
        size = parse_size(str(text))
    except ValueError:
        size = -1
    if not BODY_BYTES_MIN <= size <= BODY_BYTES_MAX:
        raise ConfigError(f"{key} {text!r} must be a size from 1KiB to 1GiB, such as 32MiB")
    return size


def _receipts(key: str, text: str) -> tuple[Path | None, int]:
    """(path, bytes) of FILE[:SIZE]; None as the path: no receipts. Raises ConfigError."""
    if not text:
        return None, RECEIPT_BYTES
    name, colon, size = text.rpartition(":")
    path = Path(name if colon else text)
    written = path if os.path.lexists(path) else path.parent
    if os.path.isdir(path) or not os.access(written, os.W_OK):
        raise ConfigError(
            f"--{key} {path} must be a file, in a directory that exists and this user may write"
        )
    return path, _body_size(key, size) if colon else RECEIPT_BYTES


def socket_path(_key: str, text: str) -> Path:
    """Absolute path of an attach socket. Raises ConfigError: it is too long."""
    if not text.strip():
        raise ConfigError(f"socket must be a path, such as {DEFAULT_SOCKET}")
    path = Path(text).absolute()
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"socket path {path} is longer than the {SOCKET_PATH_BYTES_MAX} bytes a socket may"
            " have: choose a shorter one"
        )
    return path


def _uids(key: str, value: list[int | str] | int | str) -> frozenset[int]:
    texts = [str(each) for each in (value if isinstance(value, list) else [value])]
    for text in texts:
        if not (text.isascii() and text.isdigit() and int(text) <= UID_MAX):
            raise ConfigError(
                f"{key} {text!r} must be a numeric user id, such as 1000: 'id -u NAME' prints"
                " that of a user"
            )
    if not texts:
        raise ConfigError(f"{key} must name numeric user ids, such as 1000")
    return frozenset(map(int, texts)) | {os.geteuid()}


def _origins(key: str, given: Sequence[str]) -> tuple[str, ...]:
    if list(given) == ["none"]:
        return ()
    for origin in given:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/,]+", origin.lower()):
            raise ConfigError(
                f"--{key} {origin!r} must be * or an origin such as https://chat.example, or none"
            )
    return tuple(origin.lower() for origin in given)  # as browsers send them


def _collector(key: str, text: str) -> str | None:
    """URL of a collector of traces; None: the text is empty."""
    if text and not re.fullmatch(r"https?://([\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}/?", text, re.ASCII):
        raise ConfigError(
            f"--{key} {text!r} must be http://HOST:PORT or https://HOST:PORT of a collector, such"
            " as http://127.0.0.1:4317"
        )
    return text.rstrip("/") or None


def is_exposed(url: str, *, is_name: bool = False) -> bool:
    """Whether requests to a URL can be read on the way: plain HTTP to another machine."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    found = address_of(f"[{host}]:1" if ":" in host else f"{host}:1")
    is_loopback = found is not None and found.is_loopback and not is_name
    return parts.scheme == "http" and not (is_loopback or host == "localhost")  # RFC 6761


COLLECTOR: Final = Form("URL", str, _collector)
FILE: Final = Form("FILE", str, lambda _key, text: Path(text) if text else None)
SIZE: Final = Form("SIZE", str | int, size_of)
BODY: Final = Form("SIZE", str | int, _body_size)
RECEIPTS: Final = Form("FILE[:SIZE]", str, _receipts, (None, RECEIPT_BYTES))
SOCKET: Final = Form("PATH", str, socket_path)
UIDS: Final = Form("UID", list[int | str] | int | str, _uids, frozenset({os.geteuid(), 0}))
ORIGINS: Final = Form("ORIGIN", list[str], _origins, ("*",))
PAGES: Final = Form("ADDR|off", str | int | bool, _pages)
REPLICA_ADDR: Final = Form("ADDR", str, partial(_listening, DEFAULT_LISTEN))
ROUTER_ADDR: Final = Form("ADDR", str, partial(_listening, "10.0.0.9:8443"))
PEER_ADDR: Final = Form("ADDR", str, _reachable)
REPLICAS: Final = Form(
    "HOST:PORT", list[str] | str, partial(_servers, "index", INDEX_COUNT_MAX), ()
)
ROUTERS: Final = Form("HOST:PORT", list[str], partial(_servers, "--peer-router", None), ())
