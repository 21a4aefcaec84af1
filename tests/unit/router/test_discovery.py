"""Workers of several sources: engines that nodes list, and flags."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kvstore.config.router import WorkerAddress
from kvstore.router.engines.discovery import Discovery, addresses_listed
from kvstore.router.engines.workers import WORKERS_MAX, Workers
from kvstore.router.keys.index_calls import Listed
from kvstore.routing.events import Joined, RouteEvent, WorkerLeft
from kvstore.routing.values import WorkerWord
from kvstore.wire.load import EngineEntry

HERE = "http://127.0.0.1:8000"


def listed(engine: str, address: str = HERE, **more: Any) -> Listed:
    entry = EngineEntry(
        engine=engine, tenant="t", space=cast("Any", bytes(32)), address=address, **more
    )
    return "n1", entry


class Site:
    def __init__(self, *flags: WorkerAddress, insecure: bool = False) -> None:
        self.workers = Workers(lambda _: None)
        config = SimpleNamespace(names=(), workers=flags, insecure=insecure)
        self.discovery = Discovery(cast("Any", config), self.workers)
        self.discovery.found("flags", self.discovery._known["flags"])

    def names(self) -> list[str]:
        return sorted(worker.name for worker in self.workers)

    def list(self, *found: Listed) -> list[str]:
        self.discovery.listed(found)
        return self.names()


def test_an_engine_is_listed_with_what_its_node_knows() -> None:
    (found,) = addresses_listed([listed("e", model="m", rank=3, role="decode"), listed("f", "")])
    assert (found.name, found.url, found.node, found.engine) == ("n1/e/3", HERE, "n1", "e")
    assert (found.models, found.rank, found.role, found.tenant) == (("m",), 3, "decode", "t")


@pytest.mark.parametrize(
    "address",
    [
        "http://[::1",
        "http://h:99999",
        "http://h/path",
        "http://u@h:1",
        "ftp://h:1",
        "h:1",
        "http://",
        "http://[::1%eth0]:1",
        "http://[v1.a]:1",
        r"http://a\b",
        "http://a..b",
        "http://" + "a" * 64,
    ],
)
def test_an_address_that_is_none_is_left_out(address: str) -> None:
    assert Site(insecure=True).list(listed("e", address)) == []


def test_an_engine_whose_node_restarts_stays_while_it_answers() -> None:
    site = Site()
    assert site.list(listed("e"), listed("f", "http://127.0.0.1:8001")) == ["n1/e/0", "n1/f/0"]
    worker = site.workers["n1/e/0"]
    for each in site.workers:
        each.word = WorkerWord.UP
    assert site.list() == ["n1/e/0", "n1/f/0"]
    site.workers["n1/f/0"].word = WorkerWord.DOWN
    asyncio.run(site.discovery.once())
    assert site.names() == ["n1/e/0"]
    assert site.workers["n1/e/0"] is worker, "the same one, with all that is known of it"
    assert site.list(listed("again")) == ["n1/again/0"], "its place is another engine's"


def test_flags_win_over_the_list_and_an_engine_counts_once() -> None:
    site = Site(WorkerAddress(name="a", url=HERE, node="n1"))
    assert site.list(listed("e"), listed("e", rank=1)) == ["a", "n1/e/1"]


def test_an_engine_terminates_if_one_source_says_so_and_stays_the_same_worker() -> None:
    site = Site(WorkerAddress(name="a", url=HERE))
    events: list[RouteEvent] = []
    site.workers._note = events.append
    known, pod = site.workers["a"], WorkerAddress(name="pod", url=HERE, is_terminating=True)
    site.discovery.found("slices", [pod])
    assert (site.names(), site.workers["a"]) == (["a"], known)
    assert [e.spec.is_terminating for e in events if isinstance(e, Joined)] == [True]
    site.discovery.found("slices", [pod])
    site.discovery.found("slices", [])
    assert [e.spec.is_terminating for e in events if isinstance(e, Joined)] == [True, False]
    assert site.workers["a"] is known
    assert WorkerLeft("a") not in events
    elsewhere = WorkerAddress(name="b", url="http://127.0.0.1:9", is_terminating=True)
    site.discovery.found("slices", [elsewhere])
    moved = msgspec.structs.replace(elsewhere, url="http://127.0.0.1:8", is_terminating=False)
    before = site.workers["b"]
    site.discovery.found("slices", [moved])
    assert site.workers["b"] is not before, "another address is another pod"


def test_prompts_go_to_no_engine_beyond_this_machine_in_the_clear(
    caplog: pytest.LogCaptureFixture,
) -> None:
    far, site = listed("far", "http://10.0.0.7:8000"), Site()
    for _ in range(2):
        assert site.list(listed("e"), far) == ["n1/e/0"]
    assert "http://10.0.0.7:8000 is left out" in str(site.discovery.troubles)
    assert len(caplog.records) == 1
    assert site.list(listed("e"), listed("far", "https://10.0.0.7:8000")) == ["n1/e/0", "n1/far/0"]
    assert str(site.discovery.troubles) == ""
    assert Site(insecure=True).list(far) == ["n1/far/0"]


def test_no_other_node_takes_the_place_of_an_engine_that_is_listed() -> None:
    site = Site()
    other = ("n0", listed("f", role="prefill")[1])
    assert site.list(listed("e")) == ["n1/e/0"]
    known = site.workers["n1/e/0"]
    assert site.list(other, listed("e")) == ["n1/e/0"]
    crowd = [listed(f"c{n}", f"http://127.0.0.1:{n + 1}") for n in range(2 * WORKERS_MAX)]
    assert "n1/e/0" in site.list(*crowd, listed("e"))
    assert site.workers["n1/e/0"] is known
    assert {"n0/f/0", "n1/e/0"} & set(site.list(other)) == {"n0/f/0"}
