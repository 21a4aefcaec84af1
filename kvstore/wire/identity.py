"""The names that a certificate gives its owner: `NAME.ROLE.kvstore`, see `kvstore.client.tls`.

Covers: which names are such. Does not cover: reading them from certificates (whoever has one).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

Role = Literal["node", "index", "client"]
ROLES: Final[tuple[Role, ...]] = ("node", "index", "client")
_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,198}[a-z0-9])?")
_IDENTITY: Final = re.compile(rf"({_NAME.pattern})\.({'|'.join(ROLES)})\.kvstore")


class Identity(NamedTuple):
    """One name that a certificate gives its owner."""

    role: Role
    name: str

    def __str__(self) -> str:
        return f"{self.name}.{self.role}.kvstore"


def is_name(text: str) -> bool:
    """Whether a component can be called so."""
    return _NAME.fullmatch(text) is not None and ".." not in text


def identities_of(names: Iterable[str]) -> frozenset[Identity]:
    """Those of a certificate with these DNS names."""
    found = (_IDENTITY.fullmatch(name.lower()) for name in names)
    return frozenset(Identity(match[2], match[1]) for match in found if match)  # type: ignore[arg-type]
