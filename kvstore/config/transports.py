"""`--transport NAME[,KEY=VALUE…]`: the back end that moves blocks between nodes, and its options.

    tcp,port=9481            the port of block transfer; a random one otherwise
    nixl,plugin=LIBFABRIC    a plugin of NIXL's, which gets plugin.NAME=VALUE
    NAME,pace=on             a window per peer that gives way to other flows (`transport.reads`)

The default is tcp where there are certificates, since only tcp encrypts and authenticates; with
--insecure NIXL where that is installed. Does not cover: the back ends (`transport`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvstore.client.tls import PORT_MAX
from kvstore.errors import ConfigError
from kvstore.installation import is_installed
from kvstore.transport.backends import BACKENDS, refuse_absent

PLAIN: Final = (
    "--transport %s: blocks are transferred without encryption and authentication: every host"
    " that reaches the ports of the transfer worker can read them; for trusted networks only;"
    " tcp uses the certificates"
)
PLAIN_NOTE: Final = "blocks move unencrypted (--transport {})"
_SWITCH: Final = {"on": True, "off": False}


@dataclass(frozen=True, kw_only=True)
class TransportConfig:
    """A back end, checked as far as possible without opening it."""

    name: str
    """One of `transport.backends`."""
    port: int = 0
    """Port of block transfer over tcp; 0: the kernel chooses."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the back end, by its own names."""
    is_paced: bool = False
    takes_writes: bool = False
    """Whether peers can push blocks with it."""
    is_plain: bool = False
    """No encryption and no authentication, while all other connections have both."""


def parse_transport(text: str | None, *, has_tls: bool) -> TransportConfig:
    """The back end that --transport names; None: the default. Raises ConfigError."""
    name, *parts = (text or _default(has_tls=has_tls)).split(",")
    if name not in BACKENDS:
        raise ConfigError(f"transport {name!r} must be one of {', '.join(BACKENDS)}")
    can = BACKENDS[name].capabilities
    forms = {**can.options, "pace": "on|off"}
    options: dict[str, str] = {}
    for part in parts:
        key, is_there, value = part.partition("=")
        if not is_there or not value or not _is_known(forms, key) or key in options:
            raise ConfigError(
                f"transport {text!r} cannot have {part!r}: write {_written(forms)}, each once"
            )
        options[key] = value
    pace = options.pop("pace", "off")
    if pace not in _SWITCH:
        raise ConfigError(f"transport {text!r}: pace is on or off, not {pace!r}")
    port = options.pop("port", "0")
    if not (port.isascii() and port.isdecimal() and int(port) <= PORT_MAX):
        raise ConfigError(f"transport {text!r}: port is a number up to {PORT_MAX}, not {port!r}")
    refuse_absent(name)
    return TransportConfig(
        name=name,
        port=int(port),
        options=options,
        is_paced=_SWITCH[pace],
        takes_writes=can.takes_writes,
        is_plain=has_tls and not can.is_secure,
    )


def _default(*, has_tls: bool) -> str:
    has_nixl = any(map(is_installed, BACKENDS["nixl"].capabilities.modules))
    return "nixl" if has_nixl and not has_tls else "tcp"


def _is_known(forms: Mapping[str, str], key: str) -> bool:
    prefix, dot, rest = key.partition(".")
    return bool(rest) and f"{prefix}{dot}OPTION" in forms if dot else key in forms


def _written(forms: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in forms.items())
