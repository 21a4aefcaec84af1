"""Two nodes, two real engines: what one computed, the other is served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.testing.engine import Engine
from kvstore.testing.index_process import Lab
from kvstore.testing.peers import at_rest, metric
from kvstore.testing.process import NodeProcess
from tests.integration.engine.fixtures import MAX_TOKENS, Reference
from tests.integration.engine.support import attached, node_for, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def test_an_engine_is_served_what_another_nodes_engine_computed_and_says_the_same_tokens(
    plain: Engine, prompts: Sequence[tuple[int, ...]], reference: Reference, tmp_path: Path
) -> None:
    lab = Lab(tmp_path)
    reachable = ("--peer-listen", "127.0.0.1:0")
    with_index = ("--index-listen", "127.0.0.1:0")
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    flags = (*with_index, *reachable, *lab.flags("node", "there", with_index=True))
    with node_for(plain, there, flags=flags) as far:
        plain.complete_many(prompts, max_tokens=MAX_TOKENS, concurrency=8)
        flags = ("--index", far.index, *reachable, *lab.flags("node", "here"))
        with NodeProcess.start(here, dram="512MiB", flags=flags) as near:
            config = replace(plain.config, socket=near.socket)
            with Engine.start(config, log=here / "engine.log") as engine:
                wait_until(lambda: attached(engine, near), "the engine attached", seconds=60)
                # It knows where the other is, and the other has told what it holds.
                wait_until(lambda: _members(far) == 2, "they know each other", seconds=60)
                done = engine.complete_many(prompts, max_tokens=MAX_TOKENS, concurrency=8)
                assert [i for i, c in enumerate(done) if c.tokens != reference.answers[i]] == []
                # The tiny model computes a block as quickly as a busy machine fetches it: the first
                # are fetched, to see; whether more are is a matter of cost.
                fetched = metric(near, "kvstore_fetched_blocks_total")
                assert fetched >= 1, "what the other holds was not tried"
            at_rest(near)
        assert metric(far, "kvstore_loaned_blocks_total") >= fetched


def _members(node: NodeProcess) -> int:
    return int(metric(node, "kvstore_index_nodes", '{trust="exact"}'))
