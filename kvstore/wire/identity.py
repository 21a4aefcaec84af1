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
    """Whether a component can have this name."""
    return _NAME.fullmatch(text) is not None and ".." not in text


def identities_of(names: Iterable[tuple[str, str]]) -> frozenset[Identity]:
    """Identities of a certificate with these (kind, alternative name), as `ssl` lists them. Only
    names of kind "DNS" count: an authority that lets people choose URIs and e-mail addresses has
    not looked for names of components in them."""
    found = (_IDENTITY.fullmatch(name.lower()) for kind, name in names if kind == "DNS")
    return frozenset(Identity(match[2], match[1]) for match in found if match)  # type: ignore[arg-type]
