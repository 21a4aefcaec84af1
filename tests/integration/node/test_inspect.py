"""`kvstore inspect` and `kvstore clear` against a real node, as an operator types them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.connector.config import ConnectorConfig
from kvstore.connector.scheduler_side import SchedulerSide
from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import RawEngine, make_keys
from kvstore.units import NS_PER_S
from kvstore.wire.messages import Story
from tests.integration.node.conftest import eventually
from tests.kit.command import kvstore
from tests.kit.cores import core_config
from tests.kit.gauges import page, samples
from tests.kit.one_group import OneGroup

pytestmark = pytest.mark.slow


def inspected(node: NodeProcess, *arguments: str) -> dict[str, Any]:
    done = kvstore("inspect", *arguments, "--json", "--socket", str(node.socket))
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture
def two_models(node: NodeProcess) -> Iterator[tuple[RawEngine, RawEngine]]:
    """One engine with 5 blocks, one of another model with 3 blocks on each of two ranks."""
    with (
        RawEngine(node.socket, engine_id="one", model="llama") as one,
        RawEngine(node.socket, engine_id="two", model="qwen", rank_count=2) as two,
    ):
        for engine, count in ((one, 5), (two, 3)):
            engine.open()
            engine.store(make_keys(count))
            engine.release(engine.lease_stored(make_keys(count)))
        yield one, two


def test_savings_are_those_of_requests_that_have_ended(
    node: NodeProcess, two_models: tuple[RawEngine, RawEngine]
) -> None:
    hour_ns = 3600 * NS_PER_S
    for engine, (saved, load) in zip(two_models, ((5, 1), (1, 3)), strict=True):
        story = Story("r", loaded_tokens=16, saved_ns=saved * hour_ns, load_ns=load * hour_ns)
        assert engine.scheduler.send(story)
    assert eventually(lambda: len(inspected(node, "savings")["savings"]) == 2)
    found = inspected(node, "savings", "--gpu-hour", "2.50")
    assert [(row["model"], row["net_gpu_hours"], row["net_money"]) for row in found["savings"]] == [
        ("llama", 4, 10),
        ("qwen", -4, -10),  # on two ranks
    ]
    assert [found["total"][0][f"{name}_hours"] for name in ("saved", "spent", "lost")] == [6, 4, 2]
    shown = kvstore("inspect", "savings", "--gpu-hour", "2.50", "--socket", str(node.socket))
    assert shown.stdout.splitlines()[-1].split()[-1] == "0.0000"


def test_json_is_what_was_stored(
    node: NodeProcess, two_models: tuple[RawEngine, RawEngine]
) -> None:
    reply = two_models[0].lease(make_keys(4))
    found = inspected(node)
    assert list(found) == ["nodes", "tiers", "spaces", "leases", "jobs"]
    (row,) = found["nodes"]
    assert (row["connections"], row["owners"], row["sessions"], row["leases"]) == (5, 2, 2, 1)
    dram = next(tier for tier in found["tiers"] if tier["tier"] == "dram")
    assert dram["capacity_bytes"] == 64 << 20
    assert dram["blocks"] == dram["slots_sealed"] == 5 + 2 * 3
    assert dram["slots_leased"] == 4
    spaces = {space["label"]: space for space in found["spaces"]}
    assert {name: space["blocks_dram"] for name, space in spaces.items()} == {"llama": 5, "qwen": 6}
    (lease,) = found["leases"]
    assert (lease["engine_id"], lease["lease"], lease["blocks"]) == ("one", reply.lease, 4)
    assert {(job["engine_id"], job["rank"]) for job in found["jobs"]} == {
        ("one", 0),
        ("two", 0),
        ("two", 1),
    }


def test_blocks_by_space_and_limit(
    node: NodeProcess, two_models: tuple[RawEngine, RawEngine]
) -> None:
    space = next(s for s in inspected(node, "spaces")["spaces"] if s["label"] == "llama")["space"]
    blocks = inspected(node, "blocks", "--space", space[:8].upper())["blocks"]
    assert {block["key"] for block in blocks} == {key[:4].hex() for key in make_keys(5)}
    assert {block["space"] for block in blocks} == {space}
    assert len(inspected(node, "blocks", "--limit", "2")["blocks"]) == 2
    for limit, said in (("2", "more than these 2 blocks exist: --limit shows"), ("500", "")):
        done = kvstore("inspect", "blocks", "--limit", limit, "--socket", str(node.socket))
        assert done.returncode == 0
        assert done.stderr.startswith(said)
        assert bool(done.stderr) == bool(said)


def test_clear_forgets_one_space_and_then_all(
    node: NodeProcess, two_models: tuple[RawEngine, RawEngine]
) -> None:
    one, two = two_models
    space = next(s for s in inspected(node, "spaces")["spaces"] if s["label"] == "qwen")["space"]
    done = kvstore("clear", "--space", space[:6], "--socket", str(node.socket))
    assert (done.returncode, done.stdout) == (0, "6 blocks forgotten\n")
    assert len(two.lease(make_keys(3)).slots) == 0
    assert len(one.lease(make_keys(5)).slots) == 5 * 4
    done = kvstore("clear", "--space", "", "--socket", str(node.socket))
    assert (done.returncode, done.stdout) == (2, ""), "a variable that is not set is not all"
    assert "--space is empty" in done.stderr
    done = kvstore("clear", "--socket", str(node.socket))
    assert (done.returncode, done.stdout) == (0, "5 blocks forgotten\n")
    assert inspected(node, "nodes")["nodes"][0]["blocks"] == 0
    one.store(make_keys(1))
    assert len(one.lease_stored(make_keys(1)).slots) == 4, "engines go on"


def test_an_unknown_space_is_neither_cleared_nor_empty(
    node: NodeProcess, two_models: tuple[RawEngine, RawEngine]
) -> None:
    for command in ("clear",), ("inspect", "blocks"):
        done = kvstore(*command, "--space", "zz", "--socket", str(node.socket))
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == "kvstore: no space begins with 'zz': see kvstore inspect spaces\n"
    assert inspected(node, "nodes")["nodes"][0]["blocks"] == 11


def test_tables_are_for_people(node: NodeProcess, two_models: tuple[RawEngine, RawEngine]) -> None:
    done = kvstore("inspect", "--socket", str(node.socket))
    assert done.returncode == 0
    assert "64 MiB" in done.stdout
    assert "leases none\n" in done.stdout
    assert "\x1b" not in done.stdout, "no colours into a pipe"
    assert "file" not in done.stdout.split("spaces")[0].split("tiers")[1].split("blocks")[1], (
        "a tier the node does not have is not shown"
    )
    blocks = kvstore("inspect", "blocks", "--socket", str(node.socket), columns="20").stdout
    assert len(blocks.splitlines()) == 2 + 11, "a row is a line, however narrow"


def test_a_stopped_node_is_said_to_be_stopped(node: NodeProcess) -> None:
    node.pause()
    done = kvstore("inspect", "nodes", "--socket", str(node.socket))
    node.resume()
    assert done.returncode == 1
    assert "did not answer within 5 s: it is stopped or overloaded" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["node"], ["inspect"], ["clear"], ["explain"], ["fsck"]])
def test_every_command_has_help_with_an_example(arguments: list[str]) -> None:
    done = kvstore(*arguments, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: kvstore")
    assert re.search(r"\n  Examples?:\n    (kvstore|pip) .+\n    kvstore ", done.stdout), "by line"


def test_no_engine_writes_to_the_operators_terminal(node: NodeProcess) -> None:
    with RawEngine(node.socket, engine_id="\x1b[31mred", model="\x1b]0;title\x07") as engine:
        engine.open()
        engine.store(make_keys(1))
        engine.lease_stored(make_keys(1))
        done = kvstore("inspect", "--socket", str(node.socket))
    assert "?[31mred" in done.stdout
    assert "\x1b" not in done.stdout


# ── an engine that gets nothing from its node ─────────────────────────────────────────────────────


REASON = "the KV cache is on cuda: this version serves CPU caches only"


def test_a_cache_that_is_not_served_is_seen_by_the_operator(node: NodeProcess) -> None:
    config = core_config(
        engine_id="gpu", nonce="n", process="p", tenant="t", rank_count=1, block_tokens=16
    )
    with RawEngine(node.socket, engine_id="cpu") as served:
        served.open()
        assert page(node, "/healthz") == (200, "ok\n")
        side = SchedulerSide(ConnectorConfig(socket=str(node.socket)), config, OneGroup(16))
        side.cannot_be_served(REASON)

        def told() -> bool:
            side.poll()
            return samples(node)["kvstore_engines_unserved"] == 1

        assert eventually(told)
        assert page(node, "/healthz")[1] == f"ok, but engine gpu is not served: {REASON}\n"
        assert inspected(node, "nodes")["unserved"] == [
            {"engine": "gpu", "tenant": "t", "reason": REASON}
        ]
        side.close()
        assert eventually(lambda: samples(node)["kvstore_engines_unserved"] == 0)
        assert page(node, "/healthz") == (200, "ok\n")
