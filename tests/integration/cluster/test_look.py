"""What an operator sees of a cluster: two real nodes, the commands as he types them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvstore.index.chain import block_keys
from kvstore.testing.index_process import Lab
from kvstore.testing.peers import PeerPair
from kvstore.testing.raw_engine import BLOCK_TOKENS, RawEngine, make_keys
from kvstore.wire.messages import Story
from tests.integration.cluster.kit import CONVERGES_S
from tests.integration.node.conftest import eventually
from tests.integration.node.test_inspect import kvstore

pytestmark = pytest.mark.slow

TOKENS = [(n * 7919) % 50_000 for n in range(BLOCK_TOKENS * 12 + 3)]
KEYS: list[bytes] = list(block_keys(TOKENS, block_tokens=BLOCK_TOKENS, seed="0"))
STORED = 10


class System(NamedTuple):
    """Node b holds a prompt's beginning, an engine of node a may ask for it."""

    pair: PeerPair
    there: RawEngine
    here: RawEngine
    asks: tuple[str, ...]
    folder: Path


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("look")
    with (
        PeerPair.start(folder, transport="tcp") as pair,
        RawEngine(pair.b.socket, engine_id="b", timeout_s=60) as there,
        RawEngine(pair.a.socket, engine_id="a", timeout_s=60) as here,
    ):
        there.open()
        here.open()
        there.store(KEYS[:STORED])
        there.release(there.lease_stored(KEYS[:STORED]))
        asks = ("--index", pair.a.index, *Lab(folder).flags("client", "ops"))
        yield System(pair, there, here, asks, folder)


def asked(*arguments: str) -> dict[str, Any]:
    done = kvstore(*arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_prefix_says_how_far_each_node_goes(system: System) -> None:
    (system.folder / "prompt.json").write_text(json.dumps(TOKENS))
    (system.folder / "keys").write_text("\n".join(key.hex() for key in KEYS))
    where = ("inspect", "prefix", "--socket", str(system.pair.a.socket), *system.asks)
    by_tokens = (*where, "--tokens-file", str(system.folder / "prompt.json"))
    by_keys = (*where, "--keys-file", str(system.folder / "keys"))

    def holders(arguments: tuple[str, ...]) -> dict[str, int]:
        rows = asked(*arguments)["prefix"]["holders"]
        return {row["node"]: row["dram_blocks"] for row in rows}

    assert eventually(lambda: holders(by_tokens).get("b") == STORED, timeout_s=CONVERGES_S)
    found = asked(*by_keys)["prefix"]
    assert found["held_tokens"] == STORED * BLOCK_TOKENS
    assert (found["asked_blocks"], found["label"]) == (len(KEYS), "model")
    shown = kvstore(*by_tokens, columns="80")
    assert shown.returncode == 0
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert ["b", "-", "exact", "0", str(STORED), str(STORED)] in rows
    assert max(map(len, shown.stdout.splitlines())) <= 200
    assert not any(key.hex()[:8] in shown.stdout for key in KEYS)


def test_nodes_of_the_index_need_no_node_here(system: System) -> None:
    rows = asked("inspect", "nodes", *system.asks)["members"]
    assert [(row["node"], row["trust"]) for row in rows] == [("a", "exact"), ("b", "exact")]
    shown = kvstore("inspect", "nodes", *system.asks)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "exact" in shown.stdout


def test_explain_names_the_node_and_how_long_it_took(system: System) -> None:
    here, a = system.here, system.pair.a
    reply = system.pair.borrow(here, KEYS[:STORED])
    here.release(reply)
    missing = make_keys(2, seed="nobody stored these")
    other = here.lease(missing)
    here.release(other)
    stories = {"came": (reply, STORED, STORED), "did-not": (other, len(missing), 0)}
    for request, (lease, blocks, loaded) in stories.items():
        told = Story(
            request=request,
            prompt_tokens=blocks * BLOCK_TOKENS,
            loaded_tokens=loaded * BLOCK_TOKENS,
            peer_tokens=loaded * BLOCK_TOKENS,
            outcome="" if loaded else "not stored",
            session=here.session,
            leases=[lease.lease],
        )
        assert here.scheduler.send(told)

    def rows(request: str) -> list[dict[str, Any]]:
        done = kvstore("explain", request, "--json", "--socket", str(a.socket))
        return json.loads(done.stdout)["requests"][0]["ranges"] if not done.returncode else []

    assert eventually(lambda: bool(rows("did-not")), timeout_s=CONVERGES_S)
    (came,) = rows("came")
    assert (came["blocks"], came["tier"], came["node"]) == (STORED, "peer", "b")
    assert re.fullmatch(
        rf"loaded, after it was fetched from node b: {STORED} blocks in \d+\.\d ms", came["text"]
    )
    (missed,) = rows("did-not")
    assert (missed["reason"], missed["sought"]) == ("never stored", "nobody has it")
    shown = kvstore("explain", "came", "--socket", str(a.socket))
    assert f"{STORED * BLOCK_TOKENS} from other nodes" in shown.stdout
    header, row = shown.stdout.splitlines()[-2:]
    assert header.split() == ["blocks", "tokens", "tier", "node", "missed", "why"]
    assert row.split()[:5] == ["0-9", "0-159", "peer", "b", "-"]
