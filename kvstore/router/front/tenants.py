"""API keys of clients, and the tenants that they belong to.

    team-a: [sha256:9f86d0…, another-key]        one line a tenant, in YAML
    team-b: sha256:2c26b4…

A key is compared by its SHA-256, which the file may hold in its place. A tenant's requests get the
tenant's own `cache_salt`, so that no cache, of an engine or of a node, answers one tenant with
blocks of another, and nobody learns from a quick answer what others asked. A salt of the client is
kept behind the tenant's.

Ways to be wrong, each a ConfigError: no YAML, no mapping, a tenant or a key twice, a key that is
short, a hash of another length, a name that is none.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Final

from kvstore.config.yaml_file import read_yaml
from kvstore.errors import ConfigError
from kvstore.wire.identity import is_name

KEY_CHARACTERS_MIN: Final = 16
_HASH: Final = re.compile(r"sha256:([0-9a-f]{64})")


class Tenants:
    """Tenants by the hash of their keys."""

    def __init__(self, by_hash: dict[bytes, str]) -> None:
        self._by_hash = by_hash

    def of(self, key: str) -> str | None:
        """The tenant of an API key; None: nobody's."""
        return self._by_hash.get(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest())


def salt(tenant: str, given: str) -> str:
    """`cache_salt` of a tenant's request that came with another one, or with none."""
    return f"{tenant}/{given}" if given else tenant


def load_tenants(path: Path) -> Tenants:
    """Raises ConfigError."""
    content = read_yaml("--api-keys", path)
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"--api-keys {path} must hold lines such as 'team-a: [KEY]'")
    found: dict[bytes, str] = {}
    for name, keys in content.items():
        if not isinstance(name, str) or not is_name(name):
            raise ConfigError(
                f"--api-keys {path}: {name!r} cannot be a tenant: use lower-case letters, digits,"
                " '-' and '.'"
            )
        for key in keys if isinstance(keys, list) else [keys]:
            digest = _digest(key)
            if digest is None:
                raise ConfigError(
                    f"--api-keys {path}: a key of {name!r} must be a text of at least"
                    f" {KEY_CHARACTERS_MIN} characters, or sha256: and 64 hex digits"
                )
            if found.setdefault(digest, name) != name:
                raise ConfigError(f"--api-keys {path}: {found[digest]!r} and {name!r} share a key")
    return Tenants(found)


def _digest(key: object) -> bytes | None:
    if not isinstance(key, str):
        return None
    if match := _HASH.fullmatch(key):
        return bytes.fromhex(match[1])
    is_key = len(key) >= KEY_CHARACTERS_MIN and not key.startswith("sha256:")
    return hashlib.sha256(key.encode()).digest() if is_key else None
