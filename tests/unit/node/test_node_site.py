"""What the page of a node shows: rows of inspect and explain, of bounded length, without keys."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.net.site import REQUESTS_SHOWN, STATE_BYTES_MAX
from kvstore.node.pages import make_pages
from kvstore.obs.reasons import story_as_dict
from kvstore.wire.messages import REQUEST_BYTES_MAX, Story
from tests.unit.engine.harness import TOKENS, Peer, keys
from tests.unit.engine.slab import SlabNode
from tests.unit.node.test_pages import EmptyCollector


class Page:
    """The page of a node without a process."""

    def __init__(self, member: Any = None) -> None:
        self.node = SlabNode(fetches=True)
        self.queries = list[Any]()
        """Answers of the loop."""
        driver = SimpleNamespace(query=self._query)
        door = SimpleNamespace(is_in_place=True, path="/run/n")
        self._pages = make_pages(cast("Any", EmptyCollector(driver, door, member=member)))

    def _query(self, ask: Callable[[Any], Any], *, timeout_s: float) -> Any:
        self.queries.append(ask(self.node.engine))
        return self.queries[-1]

    def state(self) -> dict[str, Any]:
        page = self._pages["/state.json"]()
        assert page.status == 200
        assert len(page.body) <= STATE_BYTES_MAX
        return cast("dict[str, Any]", json.loads(page.body))

    def request(self, number: int) -> Any:
        return json.loads(self._pages["/request.json?"](f"id={number}").body)


@pytest.fixture
def page() -> Page:
    return Page()


def test_requests_are_those_of_explain_and_one_is_its_json(page: Page) -> None:
    peer = Peer(page.node, tenant="<b>t</b>")
    story: dict[str, Any] = {"prompt_tokens": 4 * TOKENS, "loaded_tokens": 3 * TOKENS}
    page.node.hear(peer.scheduler, Story("one", **story, lookup_ns=5_000, load_ns=7_000))
    page.node.hear(peer.scheduler, Story("two", prompt_tokens=TOKENS, outcome="not stored"))
    explain = page.node.engine.explain
    newest, oldest = explain.requests("", limit=9)
    two, one = page.state()["requests"]
    assert (one["number"], one["tenant"], one["loaded_tokens"]) == (1, "<b>t</b>", 3 * TOKENS)
    assert (one["lookup_us"], one["load_us"], one["outcome"]) == (5, 7, "")
    shown = story_as_dict(newest, explain.request(newest.number)[1])
    assert (two["outcome"], two["text"]) == (shown["outcome"], shown["text"])
    assert page.request(2) == json.loads(json.dumps(shown))
    assert page.request(1)["ranges"] == story_as_dict(oldest, explain.request(1)[1])["ranges"]
    assert page._pages["/request.json?"]("id=3").status == 404


def test_the_longest_names_fit_and_no_key_is_shown(page: Page) -> None:
    peers = [Peer(page.node, f"e{n}" + "x" * 60, tenant=f"{n}" + "t" * 200) for n in range(9)]
    page.node.step(peers[0].sealed(0, 1))
    count = REQUESTS_SHOWN + 9
    for number in range(count):
        story = Story("r" * REQUEST_BYTES_MAX, prompt_tokens=9, outcome="breaker open", load_ns=1)
        page.node.hear(peers[number % 9].scheduler, story)
    state = page.state()
    assert state["totals"]["requests"] == REQUESTS_SHOWN
    assert state["requests"][0]["number"] == count
    text = json.dumps(state) + json.dumps(page.request(state["requests"][0]["number"]))
    digits = {keys(number).hex() for number in range(2)}
    assert not [each for each in digits if each[:9] in text]
    assert not re.search(r"[0-9a-f]{17}", text)


def test_a_member_of_a_cluster_has_its_name_and_transfers() -> None:
    transfers = [{"kind": "move", "backend": "tcp"}]
    member = SimpleNamespace(node="n1", transfers=lambda: transfers, trouble="")
    state = Page(member).state()
    assert (state["name"], state["transfers"]) == ("n1", transfers)
