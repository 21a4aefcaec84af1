"""Two nodes, real transfer workers: what one holds the other serves, whatever the parallel sizes,
and only to those who stored it. What dies on the way is
`tests/integration/cluster/test_stages`'s."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.testing.raw_engine import make_keys
from tests.kit.gauges import look
from tests.kit.peers import PeerPair, at_rest, attached
from tests.kit.processes import event_endpoints

TRANSPORTS = ("tcp", "nixl")


@pytest.fixture(scope="module", params=TRANSPORTS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PeerPair]:
    folder = tmp_path_factory.mktemp("pair")
    with PeerPair.start(folder, transport=request.param, dram="128MiB") as pair:
        yield pair


@pytest.mark.parametrize(
    ("there", "here"), [(1, 1), (1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2)]
)
def test_every_parallel_size_is_served_from_the_other_node(
    pair: PeerPair, there: int, here: int
) -> None:
    keys = make_keys(50, seed=f"{there}-{here}")
    with (
        attached(pair.b.socket, engine_id="b", rank_count=there) as holder,
        attached(pair.a.socket, engine_id="a", rank_count=here) as asker,
    ):
        holder.store(keys)
        reply = pair.fetch(asker, keys)
        assert asker.is_right(reply, keys)
        asker.release(reply)
    at_rest(pair.a)
    at_rest(pair.b)


def test_who_did_not_store_it_is_never_given_it(pair: PeerPair) -> None:
    keys = make_keys(20, seed="mine")
    with (
        attached(pair.b.socket, engine_id="b", tenant="one") as holder,
        attached(pair.a.socket, engine_id="a", tenant="two") as asker,
        attached(pair.a.socket, engine_id="c", tenant="one", model="other") as stranger,
        attached(pair.a.socket, engine_id="d", tenant="one") as friend,
    ):
        holder.store(keys)
        pair.fetch(friend, keys)
        assert asker.lease(keys).slots == b""
        assert stranger.lease(keys).slots == b""


def test_a_cluster_on_ipv6(tmp_path: Path) -> None:
    """Index, peers, the transfer worker, pages and KV events."""
    flags = ("--metrics", "[::1]:0", "--events", "tcp://[::1]:0")
    keys = make_keys(20, seed="six")
    with (
        PeerPair.start(tmp_path, transport="tcp", dram="16MiB", flags=flags, host="[::1]") as pair,
        attached(pair.b.socket, engine_id="b") as holder,
        attached(pair.a.socket, engine_id="a") as asker,
    ):
        assert pair.a.index.startswith("[::1]:")
        assert event_endpoints(pair.a)[0].startswith("tcp://[::1]:")
        assert pair.a.metrics_url.startswith("http://[::1]:")
        holder.store(keys)
        reply = pair.fetch(asker, keys)
        assert asker.is_right(reply, keys)
        asker.release(reply)
        assert look(pair.a).sessions == 1, "its pages are read over IPv6"
