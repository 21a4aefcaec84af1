"""/healthz: a node whose disk or events are in trouble is healthy and says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.engine.sessions.unserved import UnservedReport
from kvstore.errors import NodeBusy
from kvstore.net.http import Page
from kvstore.node.pages import make_pages
from kvstore.types import SpaceId, Tier


class ScriptedDriver:
    def __init__(self) -> None:
        self.busy = False
        self.off: list[tuple[str, SpaceId, Tier | None]] = []
        self.lacking: list[UnservedReport] = []
        self.pinning = ""

    def query(self, ask: Any, *, timeout_s: float) -> Any:
        assert timeout_s > 0
        if self.busy:
            raise NodeBusy("the node is busy")
        return ask(self)

    def unserved(self) -> list[UnservedReport]:
        return self.lacking

    def unpinned(self) -> str:
        return self.pinning

    def spaces_off(self) -> list[tuple[str, SpaceId, Tier | None]]:
        return self.off


class EmptyCollector:
    refused = ""

    def collect(self) -> list[Any]:
        return []

    describe = collect


@pytest.mark.parametrize("trouble", ["", "the disk tier in /x takes no writes: it is full"])
def test_a_node_without_its_disk_is_healthy_and_says_what_it_lacks(trouble: str) -> None:
    driver, listener = ScriptedDriver(), SimpleNamespace(is_in_place=True, path="/run/n")
    collector = EmptyCollector()
    files = SimpleNamespace(trouble=trouble)
    pages = make_pages(*cast("Any", (collector, driver, listener, files)))
    expected = f"ok, but {trouble}\n" if trouble else "ok\n"
    assert pages["/healthz"]() == Page(200, "text/plain; charset=utf-8", expected.encode())
    publisher = SimpleNamespace(trouble="/e is gone")
    pages = make_pages(*cast("Any", (collector, driver, listener, files, publisher)))
    both = [f"ok, but {trouble}"] if trouble else ["ok"]
    assert pages["/healthz"]().body.decode() == ", but ".join([*both, "/e is gone\n"])
    driver.busy = True
    assert pages["/healthz"]().status == 503
    assert make_pages(*cast("Any", (collector, ScriptedDriver(), listener)))["/healthz"]().body == (
        b"ok\n"
    )


def test_a_space_that_is_off_is_named_with_what_to_do() -> None:
    driver, listener = ScriptedDriver(), SimpleNamespace(is_in_place=True, path="/run/n")
    files = SimpleNamespace(trouble="the disk is full")
    pages = make_pages(*cast("Any", (EmptyCollector(), driver, listener, files)))
    driver.off = [("t", SpaceId(b"\xab" * 32), Tier.FILE), ("u", SpaceId(bytes(32)), None)]
    assert pages["/healthz"]().body.decode() == (
        "ok, but the disk is full; space abababababababab of tenant t (and 1 more) is switched off"
        " in the disk tier: a shadow check found different values;"
        " 'kvstore clear --space abababababababab' switches it on again\n"
    )


def test_engines_that_get_nothing_are_named_with_the_reason() -> None:
    driver, listener = ScriptedDriver(), SimpleNamespace(is_in_place=True, path="/run/n")
    collector = EmptyCollector()
    page = make_pages(*cast("Any", (collector, driver, listener)))["/healthz"]
    collector.refused = "a process that wants to attach is refused: uid 5 is not allowed"
    assert page().body.decode() == f"ok, but {collector.refused}\n"
    driver.lacking = [UnservedReport("e (llama)", "t", "the KV cache is on cuda")] * 2
    assert page().body.decode() == (
        "ok, but engine e (llama) (and 1 more) is not served: the KV cache is on cuda\n"
    )


def test_a_rank_that_cannot_pin_memory_is_named_with_the_way_to_mend_it() -> None:
    driver, listener = ScriptedDriver(), SimpleNamespace(is_in_place=True, path="/run/n")
    page = make_pages(*cast("Any", (EmptyCollector(), driver, listener)))["/healthz"]
    driver.pinning = "engine e (llama): memory cannot be pinned: raise the memlock limit"
    assert page().body.decode() == f"ok, but {driver.pinning}\n"
