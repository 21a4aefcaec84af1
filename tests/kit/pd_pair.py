"""A prefill engine and a decode engine, each on a node of its own, and a router in front.

    client ─▶ router ─▶ engine p ── node p (with the index)
                └─────▶ engine d ── node d

Nodes use TLS, with certificates of a CA made for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvstore.demo.engine import CompletionClient
from kvstore.demo.play import LANDING
from kvstore.demo.stage import settled
from kvstore.testing.process import Lab, NodeProcess, RouterProcess
from tests.kit.engines import EngineConfig, EngineServer

ALL_REMOTE: Final = """
split: {uncached_min: 1, is_learned: false}
tree_blocks_max: 1  # a prompt that was there before counts as a new one
"""
"""Policy of a router that sends every prompt to engine p first."""
StartEngine = Callable[[EngineConfig, Path], EngineServer]
"""From a configuration and the path of a log."""


@dataclass
class PdPair:
    """All processes; `router` answers like an engine."""

    node_p: NodeProcess
    node_d: NodeProcess
    p: EngineServer
    d: EngineServer
    router: CompletionClient


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
    config: EngineConfig,
    start: StartEngine,
    *,
    dram: str = "512MiB",
    policy: str = "",
    transport: str = "tcp",
) -> Iterator[PdPair]:
    """Start them all in `work`, an empty directory. `policy`: of the router, which knows both
    nodes."""
    with (
        pd_nodes(work, dram=dram, transport=transport) as (node_p, node_d),
        start(_of(config, node_p), work / "engine-p.log") as p,
        start(_of(config, node_d), work / "engine-d.log") as d,
    ):
        for engine, node in ((p, node_p), (d, node_d)):
            settled(engine, node, lambda *_: True)
            engine.warm_up()
        with pd_router(work, p.port, d.port, policy=policy, is_named=True) as router:
            yield PdPair(node_p, node_d, p, d, CompletionClient(router.port))


@contextlib.contextmanager
def pd_router(
    directory: Path,
    p_port: int,
    d_port: int,
    flags: Sequence[str] = (),
    *,
    policy: str = "",
    is_named: bool = False,
) -> Iterator[RouterProcess]:
    """A router of two engines. `is_named`: with the nodes of both, so that their legs are together;
    else the first answer of engine p names its node."""
    node_p, node_d = (",node=p", ",node=d") if is_named else ("", "")
    workers = [
        *("--worker", f"p=http://127.0.0.1:{p_port},role=prefill{node_p}"),
        *("--worker", f"d=http://127.0.0.1:{d_port},role=decode{node_d}"),
    ]
    with RouterProcess.start(directory, [*workers, *flags], policy=policy) as router:
        router.await_worker()
        yield router


def _of(config: EngineConfig, node: NodeProcess) -> EngineConfig:
    return replace(config, socket=node.socket, engine_id=f"engine-{node.directory.name}")
