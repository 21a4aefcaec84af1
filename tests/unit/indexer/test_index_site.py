"""What the page of an index shows: nodes, those that are not followed first, at any number."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

from kvstore.index.feed import Trust
from kvstore.index.holdings import Statistics
from kvstore.index.index import Member
from kvstore.indexer.replica import Replica, make_pages
from kvstore.indexer.service import IndexService
from kvstore.net.site import ROWS_MAX, STATE_BYTES_MAX
from kvstore.ports import IndexStore
from kvstore.types import Incarnation, SpaceId
from kvstore.wire.load import EngineEntry, Load

NODE_COUNT = 1000
LOAD = Load(dram_bytes=1 << 40, dram_used_bytes=1 << 39, blocks_hit=1 << 40, blocks_missed=1 << 40)


class Store:
    """The worst that an index may hold: long names, every tenth node silent."""

    trouble = ""
    failure_count = 0

    def __init__(self) -> None:
        engines = tuple(
            EngineEntry(
                engine=f"e{n}", tenant="t", space=SpaceId(bytes(32)), model=f"{n}" + "m" * 100
            )
            for n in range(4)
        )
        trusts = (Trust.STALE, *[Trust.EXACT] * 7, Trust.CATCHING_UP, None)
        self._members = [
            Member(
                f"node-{n:04}" + "x" * 50,
                Incarnation(n),
                "a" * 60,
                trusts[n % 10],
                n,
                load,
                engines,
            )
            for n in range(NODE_COUNT)
            for load in [LOAD if n % 2 else None]
        ]

    def members(self, now_ms: int) -> list[Member]:
        return self._members

    def statistics(self) -> Statistics:
        return Statistics(1, 2, 5 << 20, 6)

    async def match(self, *_: Any) -> Any:
        return SimpleNamespace(trust=Trust.EXACT)


def state() -> dict[str, Any]:
    service = IndexService(cast("IndexStore", Store()), demands_names=False)
    loop = SimpleNamespace(call=lambda work, *, timeout_s: asyncio.run(work))
    its: Any = SimpleNamespace(_loop=loop, _service=service, _store=service.store, note="")
    its.address, its.metrics, its._state = "127.0.0.1:9470", dict, lambda: Replica._state(its)
    its.state = lambda: Replica.state(its)
    page = make_pages(its, None)["/state.json"]()
    service.close()
    assert page.status == 200
    assert len(page.body) <= STATE_BYTES_MAX
    return cast("dict[str, Any]", json.loads(page.body))


def test_a_thousand_nodes_fit_and_those_in_doubt_come_first() -> None:
    found = state()
    shown = [row["trust"] for row in found["nodes"]]
    assert found["totals"] == {"nodes": NODE_COUNT}
    assert 25 <= len(shown) <= ROWS_MAX
    assert set(shown) == {"catching-up", "stale", "out"}
    assert [row["node"] for row in found["nodes"]] == sorted(row["node"] for row in found["nodes"])
    assert (found["role"], found["name"]) == ("index", "127.0.0.1:9470")
    assert found["facts"]["memory, MiB"] == 5
    assert found["flows"]["evictions"] == 6


def test_a_row_has_the_load_of_its_node_or_none() -> None:
    rows = {row["node"][:9]: row for row in state()["nodes"]}
    assert (rows["node-0009"]["dram_used_bytes"], rows["node-0009"]["engines"]) == (1 << 39, None)
    assert rows["node-0000"]["dram_bytes"] is None


def test_the_metric_has_the_words_for_trust_that_the_pages_have() -> None:
    service = IndexService(cast("IndexStore", Store()), demands_names=False)
    found = asyncio.run(
        Replica._metrics(cast("Any", SimpleNamespace(_service=service, _store=service.store)))
    )
    service.close()
    shares = {"exact": 7, "catching-up": 1, "stale": 1, "out": 1}
    assert found["index_nodes"] == {
        word: NODE_COUNT // 10 * share for word, share in shares.items()
    }
