"""Addresses in flags: HOST:PORT, where pages are, and the endpoints of KV events.

An address that other machines reach must be meant: pages need --metrics-beyond-loopback for it, KV
events --insecure.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final

from kvstore.config.defaults import DEFAULT_METRICS, EXAMPLE_EVENTS
from kvstore.errors import ConfigError

PORT_MAX: Final = 65535


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """Address of /metrics and /healthz."""

    host: str
    port: int
    """0: the kernel chooses; the ready line has the port."""


def tcp_endpoints(place: str, *, insecure: bool) -> tuple[tuple[str, str], bool]:
    """(both endpoints, whether other machines reach them)."""
    found = address_of(place)
    if found is None or found[1] == PORT_MAX:
        raise ConfigError(no_events_address(f"tcp://{place}"))
    address, port = found
    if not address.is_loopback and not insecure:
        raise ConfigError(
            f"events on {address} can be read from other machines: use 127.0.0.1 or ipc://, or"
            " add --insecure if intended"
        )
    host = f"[{address}]" if address.version == 6 else str(address)
    ports = (str(port), str(port + 1)) if port else ("*", "*")
    return (f"tcp://{host}:{ports[0]}", f"tcp://{host}:{ports[1]}"), not address.is_loopback


def no_events_address(text: object) -> str:
    """The sentence about an invalid address of KV events."""
    return (
        f"events {text!r} must be ipc:///PATH or tcp://ADDRESS:PORT, such as {EXAMPLE_EVENTS},"
        " or off"
    )


def address_of(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int] | None:
    """(address, port) of HOST:PORT; None when it is none.

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
    return None if in_brackets and address.version == 4 else (address, int(port))


def joined(host: str, port: int) -> str:
    """HOST:PORT, for people and for parsers."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def http_config(text: str | int | bool, *, beyond_loopback: bool) -> HttpConfig | None:
    """Address of the pages; None: no pages. Raises ConfigError."""
    if text is False or text == "off":  # YAML reads a bare off as false
        return None
    found = address_of(str(text))
    if found is None:
        port = f"127.0.0.1:{text}" if str(text).isdigit() else DEFAULT_METRICS
        raise ConfigError(f"metrics {text!r} must be an IP address and a port: {port}, or off")
    address, number = found
    if not address.is_loopback and not beyond_loopback:
        raise ConfigError(
            f"metrics on {address} can be read from other machines: use 127.0.0.1, or add"
            " --metrics-beyond-loopback if intended"
        )
    return HttpConfig(host=str(address), port=number)
