"""/healthz: a node whose disk is in trouble is healthy and says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.serve.driver import NodeBusy
from kvstore.serve.http import Page
from kvstore.serve.pages import make_pages


class ScriptedDriver:
    def __init__(self) -> None:
        self.busy = False

    def query(self, ask: Any, *, timeout_s: float) -> Any:
        assert timeout_s > 0
        if self.busy:
            raise NodeBusy("the node is busy")
        return ask(None)


class EmptyCollector:
    def collect(self) -> list[Any]:
        return []

    describe = collect


@pytest.mark.parametrize("trouble", ["", "the file tier in /x takes no writes: it is full"])
def test_a_node_without_its_disk_is_healthy_and_says_what_it_lacks(trouble: str) -> None:
    driver, listener = ScriptedDriver(), SimpleNamespace(is_in_place=True, path="/run/n")
    collector = EmptyCollector()
    files = SimpleNamespace(trouble=trouble)
    pages = make_pages(*cast("Any", (collector, driver, listener, files)))
    expected = f"ok, but {trouble}\n" if trouble else "ok\n"
    assert pages["/healthz"]() == Page(200, "text/plain; charset=utf-8", expected.encode())
    driver.busy = True
    assert pages["/healthz"]().status == 503
    assert make_pages(*cast("Any", (collector, ScriptedDriver(), listener)))["/healthz"]().body == (
        b"ok\n"
    )
