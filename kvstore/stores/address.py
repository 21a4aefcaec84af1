"""The address of a shared store, as an operator writes it.

Ways to be wrong, each a ConfigError that says how to mend it: another scheme; no host; a port or a
database that is no number; a password that other users can read; a file that cannot be read.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from kvstore.errors import ConfigError

DEFAULT_PORT: Final = 6379
PASSWORD_BYTES_MAX: Final = 4096


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Address of a Redis or Valkey, and the credentials for it."""

    host: str
    port: int
    database: int
    tls: bool
    ca: Path | None = None
    """CA of its certificate; None: the authorities that the system trusts."""
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    @property
    def place(self) -> str:
        """Address as a URL without credentials, for messages."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{host}:{self.port}/{self.database}"

    @property
    def is_here(self) -> bool:
        """Whether the connection is protected: by TLS, or because it is loopback."""
        if self.tls or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def store_config(url: str, *, password_file: str | None, ca: str | None) -> StoreConfig:
    """Make a StoreConfig from `--store` and the two flags beside it. Raises ConfigError for values
    that cannot be used."""
    try:
        parts = urlsplit(url)
        port, database = parts.port or DEFAULT_PORT, int(parts.path.strip("/") or 0)
    except ValueError:
        parts, port, database = urlsplit(""), 0, 0
    if parts.password is not None:
        raise ConfigError(
            "--store has a password in it, which every user of this machine can read: put it into a"
            " file and name that with --store-password-file"
        )
    if parts.scheme not in ("redis", "rediss") or not parts.hostname or parts.query or database < 0:
        raise ConfigError(
            f"--store {url!r} must be redis://HOST:PORT/N, or rediss://HOST:PORT/N with TLS, such"
            " as rediss://valkey.example:6379/0"
        )
    tls = parts.scheme == "rediss"
    if ca is not None and not tls:
        raise ConfigError("--store-ca is about rediss://: use that, or leave it out")
    if ca is not None and not (os.path.isfile(ca) and os.access(ca, os.R_OK)):
        raise ConfigError(f"--store-ca {ca} cannot be read: name the file with its certificate")
    return StoreConfig(
        host=parts.hostname,
        port=port,
        database=database,
        tls=tls,
        ca=Path(ca) if ca is not None else None,
        username=unquote(parts.username) if parts.username else None,
        password=_read(password_file) if password_file is not None else None,
    )


def _read(name: str) -> str:
    try:
        with Path(name).open(encoding="utf-8") as file:
            password = file.read(PASSWORD_BYTES_MAX).strip()
    except (OSError, UnicodeDecodeError):
        raise ConfigError(
            f"--store-password-file {name} cannot be read: name a file with the password in it"
        ) from None
    if not password:
        raise ConfigError(f"--store-password-file {name} is empty: put the password into it")
    return password
