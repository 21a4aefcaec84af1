"""A prefill engine and a decode engine, each on a node of its own, and a proxy in front.

    client ─▶ proxy ─▶ engine p ── node p (with the index)
                └────▶ engine d ── node d

For the demo, tests and benchmarks. Nodes use TLS, with certificates of a CA made for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvstore.demo.completions import CompletionClient
from kvstore.demo.engine import HitCounts, VllmServer
from kvstore.demo.engine_config import ServerConfig
from kvstore.demo.settle import settled
from kvstore.testing.index_process import Lab
from kvstore.testing.pd_process import PdProxyProcess
from kvstore.testing.process import NodeProcess

LANDING: Final = "64MiB"
"""Part of each node's dram, for blocks on their way."""
StartEngine = Callable[[ServerConfig, Path], VllmServer]
"""From a configuration and the path of a log."""


class PairClient(CompletionClient):
    """The proxy, in the place of an engine; hits are those of the decode engine."""

    def __init__(self, port: int, p: VllmServer, d: VllmServer) -> None:
        super().__init__(port)
        self._d = d
        self.start_seconds = p.start_seconds + d.start_seconds

    def hits(self) -> HitCounts:
        """As `VllmServer.hits`."""
        return self._d.hits()


@dataclass
class PdPair:
    """All processes; `proxy` answers like an engine."""

    node_p: NodeProcess
    node_d: NodeProcess
    p: VllmServer
    d: VllmServer
    proxy: PairClient


@contextlib.contextmanager
def pd_nodes(
    work: Path, *, dram: str, flags: Sequence[str] = (), transport: str = "tcp"
) -> Iterator[tuple[NodeProcess, NodeProcess]]:
    """Node p, with the index inside, and node d; attach sockets are `work`/p/s and `work`/d/s."""
    lab = Lab(work / "pki")
    with contextlib.ExitStack() as stack:
        nodes = list[NodeProcess]()
        for name in ("p", "d"):
            directory = work / name
            directory.mkdir()
            index = ("--index", nodes[0].index) if nodes else ("--index-listen", "127.0.0.1:0")
            more = ["--peer-listen", "127.0.0.1:0", "--transport", transport]
            more += ["--landing", LANDING, "--socket", str(directory / "s"), *flags]
            certificate = lab.flags("node", name, with_index=True)
            node = NodeProcess.start(directory, dram=dram, flags=(*index, *more, *certificate))
            nodes.append(stack.enter_context(node))
        yield nodes[0], nodes[1]


@contextlib.contextmanager
def pd_pair(
    work: Path,
    config: ServerConfig,
    start: StartEngine,
    *,
    dram: str = "512MiB",
    proxy_flags: Sequence[str] = (),
    transport: str = "tcp",
) -> Iterator[PdPair]:
    """Start them all in `work`, an empty directory."""
    with (
        pd_nodes(work, dram=dram, transport=transport) as (node_p, node_d),
        start(_of(config, node_p), work / "engine-p.log") as p,
        start(_of(config, node_d), work / "engine-d.log") as d,
    ):
        for engine, node in ((p, node_p), (d, node_d)):
            settled(engine, node, lambda *_: True)
            engine.warm_up()
        with PdProxyProcess.start(
            work, prefill=[p.port], decode=[d.port], flags=proxy_flags
        ) as proxy:
            yield PdPair(node_p, node_d, p, d, PairClient(proxy.port, p, d))


def _of(config: ServerConfig, node: NodeProcess) -> ServerConfig:
    return replace(config, socket=node.socket, engine_id=f"engine-{node.directory.name}")
