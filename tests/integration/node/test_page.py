"""The page in a real browser: what it shows, that names stay text, and that anybody can read it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.process import NodeProcess, RouterProcess
from kvstore.testing.raw_engine import BLOCK_TOKENS, RawEngine, make_keys
from kvstore.units import NS_PER_MS
from kvstore.wire.messages import Story
from tests.kit.processes import IndexProcess
from tests.kit.programs import need
from tests.leaks import Baseline

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

HOSTILE = "<script>document.title='x'</script><img src=x onerror=alert(1)>"
STORED = 3
KEYS = make_keys(5)
WAIT_MS = 20_000
LOOKS = ((1400, "light"), (390, "dark"))
"""Each width and each scheme once: what is readable in one does not depend on the other."""
HIDDEN = "Object.defineProperty(document, 'visibilityState', {get: () => 'hidden'})"


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """The browser has processes for pages to come; `browser` looks in the end."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    need("chromium")
    library = pytest.importorskip("playwright.sync_api", reason="pip install '.[dev]'")
    baseline = Baseline()
    with library.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        yield chromium
        chromium.close()
    assert not baseline.wait()


@contextlib.contextmanager
def opened(browser: Any, url: str, *, width: int, scheme: str, first: str = "") -> Iterator[Any]:
    """The page of a process, once it has shown something; it had no trouble when it is left."""
    troubles: list[str] = []
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.on("console", lambda said: troubles.append(said.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("dialog", lambda dialog: troubles.append(dialog.message))
    page.on("requestfailed", lambda request: troubles.append(request.url))
    if first:
        page.add_init_script(first)
    page.goto(url.removesuffix("metrics"))
    if not first:
        page.wait_for_selector("section", timeout=WAIT_MS)
    yield page
    page.close()
    assert troubles == []


def is_readable(page: Any) -> bool:
    """By axe-core, and without a scroll bar below."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    found = axe.Axe().run(page).response["violations"]
    assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


@pytest.fixture
def engine(node: NodeProcess) -> Iterator[RawEngine]:
    """One whose request loaded three blocks of five."""
    with RawEngine(node.socket, model=HOSTILE, tenant="<b>t</b>") as engine:
        engine.open()
        engine.store(KEYS[:STORED])
        engine.release(engine.lease_stored(KEYS[:STORED]))
        reply = engine.lease(KEYS)
        times: dict[str, Any] = {
            "queued_ns": 3,
            "lookup_ns": 2,
            "load_ns": 12,
            "first_token_ns": 40,
            "saved_ns": 60,
        }
        story = Story(
            request="cmpl-4f1a",
            prompt_tokens=len(KEYS) * BLOCK_TOKENS,
            loaded_tokens=STORED * BLOCK_TOKENS,
            session=engine.session,
            leases=[reply.lease],
            **{name: ms * NS_PER_MS for name, ms in times.items()},
        )
        assert engine.scheduler.send(story)
        engine.release(reply)
        yield engine


def test_a_node_in_any_look(browser: Any, node: NodeProcess, engine: RawEngine) -> None:
    for width, scheme in LOOKS:
        with opened(browser, node.metrics_url, width=width, scheme=scheme) as page:
            page.wait_for_selector("[data-request='1']", timeout=WAIT_MS)
            assert is_readable(page)
            assert page.title() == "kvstore node"
            assert page.locator("img, main script, main b").count() == 0
            assert HOSTILE in page.locator("#card-requests").inner_text()
            assert "60 % of blocks" in page.locator("#card-hits").inner_text()
            assert "Too few lookups yet: " in page.locator("#card-curve").inner_text()
            assert "+46 ms" in page.locator("#card-savings").inner_text()
            button = page.locator("[data-request='1']")
            button.focus()
            shown = button.inner_text()
            page.wait_for_function(
                "shown => document.querySelector('[data-request]').innerText !== shown",
                arg=shown,
                polling=200,
            )  # drawn again
            assert button.evaluate("each => each === document.activeElement")
            page.keyboard.press("Enter")
            page.wait_for_selector("#story-body .bar", timeout=WAIT_MS)
            assert is_readable(page)
            told = page.locator("#story").inner_text()
            assert "Request cmpl-4f1a" in told
            assert "never stored since the node started" in told
            label = page.locator("#story-body .bar").get_attribute("aria-label")
            assert label == (
                "queued 3 ms, lookup 2 ms, waited for blocks 0 ms, load 12 ms,"
                " computed, and waited to be 23 ms"
            )
            page.keyboard.press("Escape")
            assert not page.locator("#story").is_visible()


def test_without_traffic_each_part_says_why_it_is_empty(
    browser: Any, tmp_path: Path, node: NodeProcess
) -> None:
    flags = ["--worker", "a=http://127.0.0.1:9", "--insecure"]
    with (
        IndexProcess.start(tmp_path) as index,
        RouterProcess.start(tmp_path, flags) as router,
    ):
        said = {}
        for role, url in {
            "node": node.metrics_url,
            "index": index.metrics_url,
            "router": router.metrics_url,
        }.items():
            with opened(browser, url, width=390, scheme="dark") as page:
                assert is_readable(page)
                assert page.title().startswith(f"kvstore {role}")
                said[role] = page.locator("main").inner_text()
    assert "Send one to an engine with the kvstore connector" in said["node"]
    assert "start one with --index and this address" in said["index"]
    assert "No request has ended since the router started" in said["router"]


def test_a_page_asks_only_while_it_is_seen_and_keeps_what_it_has_of_a_node_that_is_gone(
    browser: Any, node: NodeProcess
) -> None:
    asked = []
    with opened(browser, node.metrics_url, width=390, scheme="light", first=HIDDEN) as hidden:
        hidden.on("request", lambda request: asked.append(request.url))
        hidden.wait_for_timeout(2500)
        assert asked == []
    page = browser.new_page()
    page.goto(node.metrics_url.removesuffix("metrics"))
    page.wait_for_selector("section", timeout=WAIT_MS)
    node.stop()
    page.wait_for_selector("#cards.late", timeout=WAIT_MS)
    assert page.locator("#link").inner_text().startswith("shown as it was: ")
    assert page.locator("#card-tiers").is_visible()
    page.close()
