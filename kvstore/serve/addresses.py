"""Addresses in flags: HOST:PORT, and the endpoints of KV events.

Does not cover: whether an address may be reached from elsewhere (`config`), but for KV events over
TCP, which need --insecure for that.
"""

from __future__ import annotations

import ipaddress
from typing import Final

from kvstore.errors import ConfigError

EXAMPLE_EVENTS: Final = "ipc:///run/kvstore/events"
PORT_MAX: Final = 65535


def tcp_endpoints(place: str, *, insecure: bool) -> tuple[tuple[str, str], bool]:
    """(both endpoints, whether other machines reach them)."""
    found = address_of(place)
    if found is None or found[1] == PORT_MAX:
        raise ConfigError(no_events_address(f"tcp://{place}"))
    address, port = found
    if not address.is_loopback and not insecure:
        raise ConfigError(
            f"events on {address} can be read from other machines: use 127.0.0.1 or ipc://, or add"
            " --insecure if that is meant"
        )
    host = f"[{address}]" if address.version == 6 else str(address)
    ports = (str(port), str(port + 1)) if port else ("*", "*")
    return (f"tcp://{host}:{ports[0]}", f"tcp://{host}:{ports[1]}"), not address.is_loopback


def no_events_address(text: object) -> str:
    """The sentence about what cannot be an address of KV events."""
    return (
        f"events {text!r} must be ipc:///PATH or tcp://ADDRESS:PORT, such as {EXAMPLE_EVENTS},"
        " or off"
    )


def address_of(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int] | None:
    """(address, port) of HOST:PORT; None when it is none."""
    host, colon, port = text.rpartition(":")
    host = host.strip("[]")
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
        number = int(port)
    except ValueError:
        return None
    return (address, number) if colon and 0 <= number <= PORT_MAX else None
