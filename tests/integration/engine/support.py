"""What the engine tests share: a node for an engine, what it holds, and waiting with a bound."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from kvstore.cli.main import cli
from kvstore.demo.models import BLOCK_TOKENS
from kvstore.kernels.host import BOUNDS
from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import RawEngine
from tests.integration.engine.nursery import EngineNursery
from tests.integration.node.conftest import eventually
from tests.kit.engines import EngineConfig, EngineServer
from tests.kit.gauges import look
from tests.kit.peers import metric

__all__ = [
    "BLOCK_TOKENS",
    "COMPARED",
    "DIVERGED",
    "OWN_ERRORS",
    "PATIENT",
    "PREEMPTIONS",
    "SHADOWED",
    "WORST",
    "at_baseline",
    "attached",
    "blocks_in_dram",
    "blocks_on_disk",
    "cache_off_lines",
    "damage",
    "hits",
    "inspect",
    "metric",
    "no_alarm",
    "node_for",
    "served",
    "serves",
    "wait_until",
]

PATIENT: dict[str, object] = {"lookup_deadline_ms": 1000, "heartbeat_timeout_ms": 5000}
"""Where a test is about content, a busy machine must not turn hits into misses."""

SHADOWED: dict[str, object] = {**PATIENT, "shadow_every": 1}
COMPARED = "kvstore_shadow_blocks_total"
DIVERGED = "kvstore_shadow_blocks_diverged_total"
WORST = "kvstore_shadow_error_max"
"""Metrics of shadow checks."""

OWN_ERRORS = "vllm:kvstore_connector_errors_total"
PREEMPTIONS = "vllm:num_preemptions_total"
"""Metrics of an engine."""

WAIT_S = 60.0
_POLL_S = 0.05


@contextmanager
def node_for(
    engine: EngineServer, directory: Path, *, dram: str = "512MiB", flags: Sequence[str] = ()
) -> Iterator[NodeProcess]:
    """A new node where `engine` looks for one. They have met, and the engine's own cache is empty.

    `directory` has its log.
    """
    flags = ("--socket", str(engine.config.socket), *flags)
    with NodeProcess.start(directory, dram=dram, flags=flags) as node:
        wait_until(lambda: attached(engine, node), "the engine attached", seconds=60)
        engine.forget()
        yield node


@contextmanager
def served(
    vllm: EngineNursery, directory: Path, config: EngineConfig, *, dram: str = "512MiB"
) -> Iterator[tuple[EngineServer, NodeProcess]]:
    """An engine and its own node. In the end the connector has met no bug of its own, and every
    lease was given back."""
    with NodeProcess.start(directory, dram=dram) as node:
        its = replace(config, socket=node.socket)
        with vllm.start(its, log=directory / "engine.log") as engine:
            yield engine, node
            assert not engine.metrics().get(OWN_ERRORS)
        wait_until(lambda: not inspect(node, "leases"), "every lease was given back")


def has_all_its_memory(node: NodeProcess) -> bool:
    """Whether all pages of dram exist."""
    tiers = kvstore(node, "inspect", "tiers").get("tiers", [])
    dram = [tier for tier in tiers if tier["tier"] == "dram"]
    return bool(dram and dram[0]["ready_bytes"] == dram[0]["capacity_bytes"])


def attached(engine: EngineServer, node: NodeProcess) -> bool:
    """Whether the node serves an engine, which is asked for something meanwhile, and once more: by
    then it has taken its credits. Before all memory has come there are few of them, and a block
    that has none is not stored."""
    engine.warm_up()
    with suppress(OSError):  # it is being replaced
        held = look(node)
        if held.sessions > 0 and held.slots_granted > 0 and has_all_its_memory(node):
            engine.warm_up()
            return True
    return False


def cache_off_lines(engine: EngineServer) -> int:
    """How often it said that there is no node."""
    return engine.log.read_text().count("cache off, requests are computed")


def kvstore(node: NodeProcess, *arguments: str) -> Any:
    """The JSON of a command; empty when it fails. In this process, since a start of Python takes a
    hundred times as long as the answer; commands as operators type them: tests/integration/node."""
    done = CliRunner().invoke(cli, [*arguments, "--json", "--socket", str(node.socket)])
    return json.loads(done.stdout) if done.exit_code == 0 else {}


def hits(engine: EngineServer) -> float:
    """Requests that took blocks from the node so far."""
    return engine.metrics().get("vllm:kvstore_hits_total", 0)


def damage(node: NodeProcess) -> None:
    """A bit of each block in dram changes, by the hand of another engine that may write there."""
    with RawEngine(node.socket) as other:
        other.open()
        arena = other.ranks[0].arena
        assert arena is not None
        arena.array[100 :: 64 << 10] ^= 1


def inspect(node: NodeProcess, what: str) -> Any:
    """`kvstore inspect WHAT`."""
    return kvstore(node, "inspect", what)[what]


def no_alarm(node: NodeProcess, dtype: str, *, compared_min: int) -> None:
    """Shadow checks compared so many blocks at least, and found them alike by far."""
    assert metric(node, COMPARED) >= compared_min
    assert metric(node, DIVERGED) == 0
    assert metric(node, WORST) < BOUNDS[dtype] / 4, "the bound is near what honest computing gives"


def blocks_in_dram(node: NodeProcess) -> int:
    """Sealed blocks; of an engine of several ranks, their parts."""
    return look(node).slots_sealed


def blocks_on_disk(node: NodeProcess) -> int:
    """Blocks that the node's file tier holds."""
    return look(node).blocks_file


def wait_until(condition: Callable[[], bool], what: str, *, seconds: float = WAIT_S) -> None:
    """Poll with a bound; fails with what was waited for."""
    assert eventually(condition, timeout_s=seconds), f"not within {seconds} s: {what}"


def at_baseline(node: NodeProcess) -> bool:
    """No connection, no lease, no slot granted or quarantined."""
    held = look(node)
    return not (held.connections or held.leases or held.slots_granted or held.slots_quarantined)


def serves(node: NodeProcess) -> bool:
    """Whether an engine has a session."""
    with suppress(OSError):  # it is being replaced
        return look(node).sessions > 0
    return False
