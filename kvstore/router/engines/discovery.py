"""Sources of workers: flags, names in DNS, the registry of the index, EndpointSlices.

    each source ─▶ its last known addresses ─▶ all of them together ─▶ Workers.replace

A source that fails keeps what it said last: an outage of DNS or of an API server removes no worker;
probes do, when engines are gone. The index lists no engine whose node restarts: one that answers
stays. Addresses never come from requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from typing import Final
from urllib.parse import quote, urlsplit, urlunsplit

import msgspec
from yarl import URL

from kvstore.config.router import ROLES, RouterConfig, WorkerText
from kvstore.config.values import is_exposed
from kvstore.errors import ConfigError
from kvstore.net.aio import resolved
from kvstore.router.engines.workers import WorkerAddress, Workers
from kvstore.router.keys.index_calls import Listed
from kvstore.wire.load import is_base_url

PERIOD_S: Final = 5.0
INDEX: Final = "index"
"""Name of the source of engines that nodes list in the index."""
EXPOSED: Final = (
    "the engine at {} is left out: it is beyond this machine, and everybody on the way can read"
    " prompts: list it as https://, or start the router with --insecure"
)

_log = logging.getLogger(__name__)


class Discovery:
    """All sources of one router; `once` is repeated by its owner."""

    pause_s: Final = PERIOD_S

    def __init__(self, config: RouterConfig, workers: Workers) -> None:
        self._names, self._workers = config.names, workers
        self._insecure = config.insecure
        self._known: dict[str, tuple[WorkerAddress, ...]] = {
            "flags": addresses_of(config.workers),
            INDEX: (),
        }
        self._listed: tuple[Listed, ...] = ()
        self._troubles: dict[str, str] = {}

    @property
    def trouble(self) -> str:
        """Sources that fail and the reason, in one sentence; empty: none fails."""
        return "; ".join(f"{source}: {why}" for source, why in sorted(self._troubles.items()))

    def found(self, source: str, addresses: Iterable[WorkerAddress], *, trouble: str = "") -> None:
        """Take the workers that a source has now. If several sources name an engine, the entry of
        the first counts: flags, the index, the others. An engine terminates if one of them says so.
        """
        self._known[source] = tuple(addresses)
        self._troubled(source, trouble)
        names: dict[str, WorkerAddress] = {}
        places: set[tuple[str, int]] = set()
        every = [address for known in self._known.values() for address in known]
        terminating = {each.url for each in every if each.is_terminating}
        for each in every:
            if each.name not in names and (each.url, each.rank) not in places:
                is_terminating = each.url in terminating
                names[each.name] = msgspec.structs.replace(each, is_terminating=is_terminating)
                places.add((each.url, each.rank))
        self._workers.replace(names.values())

    def listed(self, listed: Iterable[Listed]) -> None:
        """Take the engines that nodes list now. An engine that left the list, as all do when their
        node restarts, stays while it answers, unless another one has its place. Known engines go
        before new ones, so that no other node takes their place and no crowd pushes them out.
        """
        self._listed = tuple(listed)
        found = list(addresses_listed(self._listed))
        left_out = [not self._insecure and is_exposed(each.url) for each in found]
        plain = [each.url for each, is_plain in zip(found, left_out, strict=True) if is_plain]
        found = [each for each, is_plain in zip(found, left_out, strict=True) if not is_plain]
        found.sort(key=lambda each: self._workers.get(each.name) is None)
        places = {(each.url, each.rank) for each in found}
        names = {each.name for each in found}
        for each in self._known[INDEX]:
            worker = self._workers.get(each.name)
            is_taken = each.name in names or (each.url, each.rank) in places
            if not is_taken and worker is not None and worker.is_answering:
                found.append(each)
        self.found(INDEX, found, trouble=EXPOSED.format(plain[0]) if plain else "")

    def failed(self, source: str, why: str) -> None:
        """A source has no answer: its workers stay."""
        self._troubled(source, f"{why}; its workers stay as they are")

    def _troubled(self, source: str, why: str) -> None:
        if why and self._troubles.get(source) != why:
            _log.warning("%s: %s", source, why)
        if why:
            self._troubles[source] = why
        else:
            self._troubles.pop(source, None)

    async def once(self) -> None:
        """Resolve all DNS names, and check again which engines that left the index still answer."""
        await asyncio.gather(*map(self._resolve, self._names))
        if self._known[INDEX]:
            self.listed(self._listed)

    async def _resolve(self, name: WorkerText) -> None:
        parts = urlsplit(name.url)
        source = f"--worker-dns {parts.netloc}"
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            places = await resolved(parts.hostname or "", port)
        except OSError as error:
            self.failed(source, str(error))
            return
        urls = [urlunsplit((parts.scheme, place, "", "", "")) for place in places]
        texts = [WorkerText(name=urlsplit(u).netloc, url=u, options=name.options) for u in urls]
        self.found(source, map(address_of_text, texts))


def addresses_of(texts: Iterable[WorkerText]) -> tuple[WorkerAddress, ...]:
    """Workers as flags name them. Raises ConfigError: two of them are one engine."""
    found, places = tuple(map(address_of_text, texts)), dict[object, WorkerAddress]()
    for each in found:
        url = URL(each.url)
        if (same := places.setdefault((url.host, url.port, each.rank), each)) is not each:
            raise ConfigError(
                f"--worker names {each.url} twice, as {same.name!r} and {each.name!r}: leave one"
                " out, or with --index give each data-parallel rank its rank=N"
            )
    return found


def addresses_listed(listed: Iterable[Listed]) -> Iterator[WorkerAddress]:
    """Addresses of the engines that nodes list; engines that list none need a flag and are left
    out.
    """
    for node, entry in ((each.node, each.entry) for each in listed):
        if is_base_url(entry.address):
            yield WorkerAddress(
                # In headers and logs: an engine may call itself anything.
                name=f"{quote(node, safe='')}/{quote(entry.engine, safe=':')}/{entry.rank}",
                url=entry.address.rstrip("/"),
                node=node,
                engine=entry.engine,
                tenant=entry.tenant,
                space=bytes(entry.space).hex(),
                models=(entry.model,) if entry.model else (),
                role=entry.role if entry.role in ROLES else "both",
                rank=entry.rank,
            )


def address_of_text(text: WorkerText) -> WorkerAddress:
    """Address of a worker from its text, whose options are already checked."""
    given = dict(text.options)
    block, seed, rank = given.pop("block", "0"), given.pop("seed", ""), given.pop("rank", "0")
    fields = {"name": text.name, "url": text.url, **given}
    fields |= {"hash_seed": seed} if seed else {}
    return msgspec.convert({**fields, "block_tokens": int(block), "rank": int(rank)}, WorkerAddress)
