"""Sources of workers: flags, names in DNS, the registry of the index, EndpointSlices.

    each source ─▶ its last known addresses ─▶ all of them together ─▶ Workers.replace

A source that fails keeps what it said last: an outage of DNS or of an API server removes no worker;
probes do, when engines are gone. The index lists no engine whose node restarts: one that answers
stays. Addresses never come from requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec
from msgspec.structs import replace

from kvstore.config.router import ROLES, RouterConfig, WorkerAddress
from kvstore.config.values import is_exposed, joined
from kvstore.errors import ConfigError
from kvstore.net.aio import resolved
from kvstore.obs.logs import Troubles
from kvstore.router.engines.workers import Workers
from kvstore.router.keys.index_calls import Listed
from kvstore.routing.values import WorkerRole
from kvstore.wire.load import is_base_url

INDEX: Final = "index"
"""Name of the source of engines that nodes list in the index."""
EXPOSED: Final = (
    "the engine at {} is left out: it is beyond this machine, and everybody on the way can read"
    " prompts: list it as https://, or start the router with --insecure"
)

_log = logging.getLogger(__name__)


class Discovery:
    """All sources of one router; `once` is repeated by its owner."""

    pause_s: Final = 5.0

    def __init__(self, config: RouterConfig, workers: Workers) -> None:
        self._names, self._workers = config.names, workers
        self._insecure = config.insecure
        self._known: dict[str, tuple[WorkerAddress, ...]] = {"flags": config.workers, INDEX: ()}
        self._listed: tuple[Listed, ...] = ()
        self.troubles = Troubles(_log, "%s: %s")
        """Sources that fail."""

    def found(self, source: str, addresses: Iterable[WorkerAddress], *, trouble: str = "") -> None:
        """Take the workers that a source has now. If several sources name an engine, the entry of
        the first counts: flags, the index, the others. An engine terminates if one of them says so.
        """
        self._known[source] = tuple(addresses)
        self.troubles.note(source, trouble)
        names: dict[str, WorkerAddress] = {}
        places: set[tuple[str, int]] = set()
        every = [address for known in self._known.values() for address in known]
        terminating = {each.url for each in every if each.is_terminating}
        for each in every:
            if each.name not in names and (each.url, each.rank) not in places:
                is_terminating = each.url in terminating
                names[each.name] = replace(each, is_terminating=is_terminating)
                places.add((each.url, each.rank))
        self._workers.replace(names.values())

    def listed(self, listed: Iterable[Listed]) -> None:
        """Take the engines that nodes list now. An engine that left the list, as all do when their
        node restarts, stays while it answers, unless another one has its place. Known engines go
        before new ones, so that no other node takes their place and no crowd pushes them out.
        """
        self._listed = tuple(listed)
        every = list(addresses_listed(self._listed))
        plain = {} if self._insecure else {a.url: None for a in every if is_exposed(a.url)}
        found = [each for each in every if each.url not in plain]
        found.sort(key=lambda each: self._workers.get(each.name) is None)
        places = {(each.url, each.rank) for each in found}
        names = {each.name for each in found}
        for each in self._known[INDEX]:
            worker = self._workers.get(each.name)
            is_taken = each.name in names or (each.url, each.rank) in places
            if not is_taken and worker is not None and worker.is_answering:
                found.append(each)
        self.found(INDEX, found, trouble=EXPOSED.format(next(iter(plain))) if plain else "")

    def failed(self, source: str, why: str) -> None:
        """A source has no answer: its workers stay."""
        self.troubles.note(source, f"{why}; its workers stay as they are")

    async def once(self) -> None:
        """Resolve all DNS names, and check again which engines that left the index still answer."""
        await asyncio.gather(*map(self._resolve, self._names))
        if self._known[INDEX]:
            self.listed(self._listed)

    async def _resolve(self, name: WorkerAddress) -> None:
        parts = urlsplit(name.url)
        source = f"--worker-dns {parts.netloc}"
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            places = await resolved(parts.hostname or "", port)
        except OSError as error:
            self.failed(source, str(error))
            return
        urls = {place: f"{parts.scheme}://{place}" for place in places}
        self.found(source, (replace(name, name=place, url=url) for place, url in urls.items()))


def addresses_listed(listed: Iterable[Listed]) -> Iterator[WorkerAddress]:
    """Addresses of the engines that nodes list; engines that list none need a flag and are left
    out.
    """
    for node, entry in listed:
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
                role=WorkerRole(entry.role if entry.role in ROLES else "both"),
                rank=entry.rank,
            )


# ── EndpointSlices ────────────────────────────────────────────────────────────────────────────────
# Workers of a Kubernetes service, by its EndpointSlices: list, then watch, over plain HTTPS.
#
#     GET endpointslices?labelSelector=kubernetes.io/service-name=… ─▶ all, with resourceVersion
#     GET …&watch=1 ─▶ ADDED, MODIFIED, DELETED, BOOKMARK, one a line ─▶ addresses
#     ERROR 410, an end or a silence ─▶ list again
#
# Pods that are ready are workers. One that terminates finishes its requests, and as long as it
# serves it gets new ones where no other worker can take them (as kube-proxy does). Services with
# `publishNotReadyAddresses` have all pods `ready`: `serving` is the readiness of one that
# terminates. The router's service account needs `get`, `list` and `watch` of endpointslices in that
# namespace. Tokens are read for each call, because the kubelet replaces them.

FILES: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LIST_TIMEOUT_S: Final = 10.0
WATCH_S: Final = 300
"""Time after which the API server ends a watch; the next one begins where it ended."""
LINE_BYTES_MAX: Final = 8 << 20


class KubernetesApi(msgspec.Struct, frozen=True, kw_only=True):
    """Address of the API server, its CA, and the token of the router's service account."""

    url: str
    ca: Path
    token: Path


class _Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class _Conditions(msgspec.Struct, frozen=True):
    """Conditions of an endpoint. None counts as ready, serving, and not terminating."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None

    @property
    def is_worker(self) -> bool:
        return (self.serving if self.terminating else self.ready) is not False


class _Target(msgspec.Struct):
    name: str = ""


class _Endpoint(msgspec.Struct, rename="camel"):
    addresses: list[str] = []
    conditions: _Conditions = _Conditions()
    target_ref: _Target | None = None


class _Meta(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    resource_version: str = ""


class _Slice(msgspec.Struct):
    metadata: _Meta = _Meta()
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _List(msgspec.Struct):
    metadata: _Meta
    items: list[_Slice] = []


class _Change(msgspec.Struct):
    type: str
    object: _Slice


def in_cluster() -> KubernetesApi:
    """The API of the cluster that this pod runs in. Raises ConfigError."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    port = os.environ.get("KUBERNETES_SERVICE_PORT_HTTPS", "443")
    if not host:
        raise ConfigError("--worker-slices works in a pod of the cluster only: use --worker-dns")
    return KubernetesApi(
        url=f"https://{joined(host, int(port))}", ca=FILES / "ca.crt", token=FILES / "token"
    )


class Slices:
    """Follows the EndpointSlices of one service; `once` is repeated by its owner."""

    def __init__(self, service: WorkerAddress, api: KubernetesApi, discovery: Discovery) -> None:
        """`service`: SCHEME://NAMESPACE/SERVICE/PORT, and what holds for all of its workers."""
        parts = urlsplit(service.url)
        namespace, (name, self._port) = parts.netloc, parts.path.strip("/").split("/")
        self._api, self._discovery = api, discovery
        self._service, self._scheme = service, parts.scheme
        self._source = f"--worker-slices {namespace}/{name}"
        self._url = (
            f"{api.url}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
            f"?labelSelector=kubernetes.io%2Fservice-name%3D{name}"
        )
        self._slices: dict[str, _Slice] = {}

    async def once(self) -> None:
        """List the slices, and watch them until the watch ends."""
        try:
            context = ssl.create_default_context(cafile=self._api.ca)
            connector = aiohttp.TCPConnector(ssl=context)
            async with aiohttp.ClientSession(
                connector=connector, read_bufsize=LINE_BYTES_MAX, trust_env=False
            ) as session:
                version = await self._list(session)
                await self._watch(session, version)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            self._discovery.failed(self._source, (str(error) or "no answer in time")[:200])

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._api.token.read_text().strip()}"}

    async def _list(self, session: aiohttp.ClientSession) -> str:
        """List all slices. Returns the resourceVersion from which to watch. Raises ValueError: no
        list.
        """
        async with (
            asyncio.timeout(LIST_TIMEOUT_S),
            session.get(self._url, headers=self._headers()) as answer,
        ):
            if answer.status != 200:
                raise ValueError(f"the API server answers {answer.status}")
            listed = msgspec.json.decode(await answer.read(), type=_List)
        self._slices = {each.metadata.name: each for each in listed.items}
        self._tell()
        return listed.metadata.resource_version

    async def _watch(self, session: aiohttp.ClientSession, version: str) -> None:
        """Apply changes from `version` on until the watch ends. Raises ValueError: it was
        refused.
        """
        url = f"{self._url}&watch=1&resourceVersion={version}&timeoutSeconds={WATCH_S}"
        url += "&allowWatchBookmarks=true"
        timeout = aiohttp.ClientTimeout(total=None, sock_read=WATCH_S + LIST_TIMEOUT_S)
        async with session.get(url, headers=self._headers(), timeout=timeout) as answer:
            if answer.status != 200:
                raise ValueError(f"the API server answers {answer.status} to a watch")
            async for line in answer.content:
                change = msgspec.json.decode(line, type=_Change)
                name = change.object.metadata.name
                if change.type == "ERROR":  # 410: too old
                    return
                if change.type == "DELETED":
                    self._slices.pop(name, None)
                elif change.type in ("ADDED", "MODIFIED"):
                    self._slices[name] = change.object
                self._tell()

    def _tell(self) -> None:
        found = {each.name: each for each in self._addresses()}
        self._discovery.found(self._source, found.values())

    def _addresses(self) -> Iterator[WorkerAddress]:
        for each in self._slices.values():
            port = next(
                (p.port for p in each.ports or () if self._port in (p.name, str(p.port))), 0
            )
            for endpoint in each.endpoints or ():
                if port and endpoint.addresses and endpoint.conditions.is_worker:
                    place = joined(endpoint.addresses[0], port)
                    target, url = endpoint.target_ref, f"{self._scheme}://{place}"
                    name = (target.name if target else "") or place
                    ends = bool(endpoint.conditions.terminating)
                    yield replace(self._service, name=name, url=url, is_terminating=ends)
