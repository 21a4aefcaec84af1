"""A node that leaves hands its hottest blocks to another, and waits for nobody in vain."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import make_keys
from tests.integration.cluster.kit import CONVERGES_S, Site, becomes, matches, member
from tests.integration.node.conftest import eventually
from tests.kit.command import kvstore
from tests.kit.peers import attached

pytestmark = pytest.mark.slow

COLD, HOT = 96, 12
LONG_S = 600


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@contextlib.contextmanager
def two(site: Site) -> Iterator[tuple[NodeProcess, NodeProcess]]:
    """One that drains, and one with the index that stays."""
    peers = ("--peer-listen", "127.0.0.1:0", "--transport", "tcp")
    index = ("--index-listen", "127.0.0.1:0")
    with contextlib.ExitStack() as stack:
        stays = site.node("n1", *peers, *index, with_index=True, dram="64MiB")
        stack.callback(stays.stop)
        drain = ("--index", stays.index, "--drain-s", str(LONG_S))
        leaves = site.node("n2", *peers, *drain, dram="64MiB")
        stack.callback(leaves.kill)
        with site.client(stays.index) as client:
            assert eventually(
                lambda: all(member(client, name) is not None for name in ("n1", "n2")),
                timeout_s=CONVERGES_S,
            )
        yield leaves, stays


def test_the_hottest_blocks_are_in_another_node_when_one_has_left(site: Site) -> None:
    cold, hot = make_keys(COLD, seed="cold"), make_keys(HOT, seed="hot")
    with two(site) as (leaves, stays), site.client(stays.index) as client:
        with attached(stays.socket) as engine:
            with attached(leaves.socket) as writer:
                writer.store(hot)
                writer.store(cold)
                writer.release(writer.lease_stored(hot))  # used last
                assert becomes(client, hot, {"n2": HOT})
                leaves.process.send_signal(signal.SIGTERM)
                assert leaves.process.wait(CONVERGES_S) == 0
            found = matches(client, hot)["n1"]
            assert found.dram_blocks == HOT
            answer = engine.ask(hot)
            assert (len(answer.slots) // 4, answer.promoting) == (HOT, 0)
            assert engine.is_right(answer, hot)
            engine.release(answer)
        assert "hottest blocks are in dram of 1 other nodes" in leaves.log


def test_an_upgrade_drains_nothing_and_nothing_waits_where_nobody_takes_a_block(
    site: Site,
) -> None:
    with two(site) as (leaves, _):
        with attached(leaves.socket) as writer:
            writer.store(make_keys(HOT, seed="hot"))
            done = kvstore("upgrade", "--socket", str(leaves.socket))
            assert done.returncode == 0, done.stderr
        assert "blocks go to" not in leaves.log
        leaves.process.send_signal(signal.SIGTERM)
        assert leaves.process.wait(CONVERGES_S) == 0
    assert "drained: 0 of the 12" in leaves.log
