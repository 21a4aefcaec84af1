"""Workers of a Kubernetes service, by its EndpointSlices: list, then watch, over plain HTTPS.

    GET endpointslices?labelSelector=kubernetes.io/service-name=… ─▶ all, with resourceVersion
    GET …&watch=1 ─▶ ADDED, MODIFIED, DELETED, BOOKMARK, one a line ─▶ addresses
    ERROR 410, an end or a silence ─▶ list again

Pods that are ready are workers. One that terminates finishes its requests, and as long as it serves
it gets new ones where no other worker can take them (as kube-proxy does). Services with
`publishNotReadyAddresses` have all pods `ready`: `serving` is the readiness of one that terminates.
The router's service account needs `get`, `list` and `watch` of endpointslices in that namespace.
Tokens are read for each call, because the kubelet replaces them.

Covers: one service. Does not cover: what sources do when they fail (`discovery`).
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvstore.config.router import WorkerText
from kvstore.config.values import joined
from kvstore.errors import ConfigError
from kvstore.router.engines.discovery import address_of_text
from kvstore.router.engines.workers import WorkerAddress

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


_list: Final = msgspec.json.Decoder(_List)
_change: Final = msgspec.json.Decoder(_Change)


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

    def __init__(
        self,
        text: WorkerText,
        api: KubernetesApi,
        *,
        found: Callable[[str, Iterable[WorkerAddress]], None],
        failed: Callable[[str, str], None],
    ) -> None:
        """
        Args:
            text: kubernetes://NAMESPACE/SERVICE/PORT and options of its workers.
            api: the API server.
            found: takes the workers that there are now.
            failed: takes why there is no answer.
        """
        namespace, service, self._port = _parts(text.url)
        self._api, self._found, self._failed = api, found, failed
        self._options = dict(text.options)
        self._scheme = "https" if self._options.pop("scheme", "") == "https" else "http"
        self._source = f"--worker-slices {namespace}/{service}"
        self._url = (
            f"{api.url}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
            f"?labelSelector=kubernetes.io%2Fservice-name%3D{service}"
        )
        self._slices: dict[str, _Slice] = {}

    async def once(self) -> None:
        """List the slices, and watch them until the watch ends; failures go to `failed`."""
        try:
            context = ssl.create_default_context(cafile=self._api.ca)
            connector = aiohttp.TCPConnector(ssl=context)
            async with aiohttp.ClientSession(
                connector=connector, read_bufsize=LINE_BYTES_MAX, trust_env=False
            ) as session:
                version = await self._list(session)
                await self._watch(session, version)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            self._failed(self._source, (str(error) or "no answer in time")[:200])

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
            listed = _list.decode(await answer.read())
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
                change = _change.decode(line)
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
        self._found(self._source, found.values())

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
                    yield msgspec.structs.replace(
                        address_of_text(WorkerText(name=name, url=url, options=self._options)),
                        is_terminating=bool(endpoint.conditions.terminating),
                    )


def _parts(url: str) -> tuple[str, str, str]:
    parts = urlsplit(url)
    service, port = parts.path.strip("/").split("/")
    return parts.netloc, service, port
