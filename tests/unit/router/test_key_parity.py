"""A router with API keys and an index: its keys name the blocks that the engine stores for what the
router sends there, of each tenant, and its own requests carry the engine's API key.

The engine, the index and the child process are what a test makes up; all between them is real.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from typing import Any, cast

import msgspec
import pytest
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from kvstore.config.router import WorkerAddress
from kvstore.index.chain import adapter_keys, block_keys
from kvstore.index.feed import Holder, Trust
from kvstore.index.index import Match
from kvstore.router.dispatch import Dispatcher
from kvstore.router.engines.calls import EngineHttp, HttpAnswer
from kvstore.router.engines.workers import WorkerAdapter
from kvstore.router.front.intake import RequestIntake, RequestJob
from kvstore.router.keys import parity
from kvstore.router.keys.child import KeyAnswer, KeyOrder, Tokenizers, answer_to
from kvstore.router.keys.index_calls import IndexCalls, Spaces
from kvstore.router.keys.parity import Parity
from kvstore.router.keys.prefixes import Prefixes, predicted_tokens
from kvstore.router.keys.process import KeyProcess
from kvstore.router.keys.rendering import COMPLETIONS, Rendering
from kvstore.routing.core import RouterCore
from kvstore.routing.learning import TokenEstimates
from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.values import Prefix, PrefixAnswer, WorkerWord
from tests.kit.coroutines import on_loop

BLOCK, SEED, SPACE = 4, "s", bytes(range(32))
KEYS = {"team-a": "key-a-of-sixteen-characters", "team-b": "key-b-of-sixteen-characters"}
TENANTS = {hashlib.sha256(key.encode()).digest(): name for name, key in KEYS.items()}
TEXT = "a prompt of some blocks"
PROMPTS: tuple[Any, ...] = (TEXT, list(range(50, 70)), [TEXT, "another prompt of some blocks"])


class Bytes(Tokenizers):
    """A token for each byte of a text, as the engine has it."""

    def ids(self, model: str, body: bytes) -> list[int] | None:
        return None if b"messages" in body else _prompts(body)[0]


class Site:
    """One engine at node n1, which the index knows as tenant t; two tenants of the router."""

    def __init__(self, *, engine_seed: str = SEED, models: tuple[str, ...] = ()) -> None:
        self.engine_seed = engine_seed
        self.stored: set[bytes] = set()
        self.asked: set[tuple[str, bytes]] = set()
        """Places that the index was asked about."""
        self.trusts = itertools.cycle([Trust.EXACT])
        """Trust in its answers, one after the other."""
        self.status = 200
        # As an index looks from outside.
        self.lost = self.trouble = ""
        self.endpoints, self.epoch, self.listed = ("index:1",), 1, ()
        dispatcher = Dispatcher(RouterCore(RoutingPolicy(), seed=1))
        self.core, self.workers = dispatcher.core, dispatcher.workers
        address = WorkerAddress(
            name="a",
            url="http://a",
            node="n1",
            tenant="t",
            space=SPACE.hex(),
            block_tokens=BLOCK,
            hash_seed=SEED,
        )
        (self.worker,) = self.workers.replace([address])
        self.worker.word, self.worker.models = WorkerWord.UP, ("m",)
        self.worker.block_tokens = BLOCK
        engines, keys = cast("EngineHttp", self), cast("KeyProcess", self)
        index = cast("IndexCalls", self)
        self.models = models
        rendering = self.rendering = Rendering(engines, self.workers, keys)
        policy = dispatcher.core.policy
        spaces = self.spaces = Spaces(self.workers, index, lambda: policy)
        self.parity = Parity(rendering, spaces)
        prefixes = Prefixes(TokenEstimates(), rendering, spaces)
        self.intake = RequestIntake(prefixes, TENANTS, dispatcher, cast("Any", None))

    # ── the engine ───────────────────────────────────────────────────────────────────────────────

    async def fetch(self, url: URL, *, body: bytes, **_: Any) -> HttpAnswer:
        if "chat" in url.path:
            return HttpAnswer(400, [], b"")
        if url.path.endswith("/render"):
            found = [{"token_ids": ids} for ids in _prompts(body)]
            return HttpAnswer(200, [], msgspec.json.encode(found if len(found) > 1 else found[0]))
        self.compute(body)
        return HttpAnswer(self.status, [], b"{}")

    def compute(self, body: bytes) -> list[bytes]:
        """Keys of the blocks that it stores for a request."""
        salt = msgspec.json.decode(body).get("cache_salt", "")
        made = [
            key
            for ids in _prompts(body)
            for key in block_keys(ids, block_tokens=BLOCK, seed=self.engine_seed, cache_salt=salt)
        ]
        if self.status == 200:
            self.stored.update(made)
        return [bytes(key) for key in made]

    # ── the child process and the index ──────────────────────────────────────────────────────────

    async def make(
        self, order: KeyOrder, tenant: str = "", *, delays_request: bool = True
    ) -> KeyAnswer:
        assert delays_request is bool(tenant), "a comparison is patient, a request is not"
        return answer_to(order, Bytes({}))

    async def match(self, tenant: str, space: bytes, keys: bytes) -> PrefixAnswer:
        self.asked.add((tenant, space))
        here = [keys[at : at + 32] in self.stored for at in range(0, len(keys), 32)]
        count = [*here, False].index(False)
        trust = next(self.trusts)
        of_n1 = Match(Holder("n1"), 0, count, count, trust)
        other = Match(Holder("n2"), 0, len(here), len(here), trust)
        return PrefixAnswer(trust, [of_n1, other], 1, frozenset())

    # ── clients ──────────────────────────────────────────────────────────────────────────────────

    async def job(self, tenant: str, **fields: Any) -> RequestJob:
        """What becomes of a client's request."""
        headers = CIMultiDictProxy(CIMultiDict({"Authorization": f"Bearer {KEYS[tenant]}"}))
        body = msgspec.json.encode({"model": "m", **fields})
        whose = self.intake.tenant(headers)
        assert whose == tenant
        return await self.intake.job(headers, COMPLETIONS, body, whose, request_id="r")

    def predicted(self, job: RequestJob) -> int:
        return predicted_tokens(job.request, self.worker.address)


def _prompts(body: bytes) -> list[list[int]]:
    """Token ids of each: of a text its bytes."""
    prompt = msgspec.json.decode(body)["prompt"]
    several = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    return [list(each.encode()) if isinstance(each, str) else each for each in several]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "STORED_S", 0.02)
    monkeypatch.setattr(parity, "ASK_AGAIN_S", 0.0)


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("salt", ["", "mine"])
@pytest.mark.parametrize("prompt", PROMPTS, ids=["text", "ids", "several"])
@on_loop
async def test_keys_of_a_tenants_request_are_those_that_the_engine_stores(
    prompt: Any, salt: str, *, is_local: bool
) -> None:
    """`is_local`: whether a tokenizer of the router makes the tokens of a text."""
    site = Site(models=("m",) if is_local else ())
    await site.parity.once()
    assert (site.worker.parity, site.worker.has_parity) == ("", True)
    fields = {"prompt": prompt} | ({"cache_salt": salt} if salt else {})
    job = await site.job("team-a", **fields)
    assert site.predicted(job) == 0, "nobody sent it before"
    stored = site.compute(job.body)
    assert job.request.keys == b"".join(stored), "the router's keys are the engine's"
    again = await site.job("team-a", **fields)
    assert site.predicted(again) == BLOCK * len(stored)
    for others in (await site.job("team-b", **fields), await site.job("team-a", prompt=prompt)):
        if others.body != job.body:
            assert site.predicted(others) == 0, "of another salt nothing is known"
    if is_local and prompt == TEXT:
        assert site.rendering.counts["local"] == 4
    assert site.asked == {("t", SPACE)}, "as the engine's node calls it, not the router's tenant"


@on_loop
async def test_an_engine_with_other_keys_is_load_only_for_tenants_too() -> None:
    site = Site(engine_seed="other")
    await site.parity.once()
    assert "0 of" in site.worker.parity
    assert [state.spec.is_red for state in site.core.fleet.workers] == [True]
    job = await site.job("team-a", prompt=TEXT)
    site.compute(job.body)
    assert (await site.job("team-a", prompt=TEXT)).request.answer is None


@on_loop
async def test_an_engine_that_refuses_a_probe_is_not_equal() -> None:
    """As one does that was given another API key."""
    site = Site()
    site.status = 401
    await site.parity.once()
    assert site.worker.parity == "a probe got status 401"
    assert not site.worker.has_parity
    site.status = 200
    await site.parity.once()
    assert not site.worker.has_parity, "it is not asked again at once"
    site.worker.compared_again_s = 0.0
    await site.parity.once()
    assert site.worker.has_parity
    assert [state.spec.is_red for state in site.core.fleet.workers] == [False]


@on_loop
async def test_a_worker_that_leaves_amid_its_comparison_stays_away() -> None:
    site = Site()
    fetch = site.fetch

    async def leaving(url: URL, *, body: bytes, **more: Any) -> HttpAnswer:
        site.workers.replace([])
        return await fetch(url, body=body, **more)

    site.fetch = leaving  # type: ignore[method-assign]
    await site.parity.once()
    assert site.worker.has_parity
    assert not site.core.fleet.workers


@on_loop
async def test_all_workers_are_load_only_from_the_start_of_the_first_comparison() -> None:
    site = Site()
    site.workers.replace(
        [site.worker.address, msgspec.structs.replace(site.worker.address, name="b")]
    )
    fetch = site.fetch
    seen: list[list[bool]] = []

    async def noticed(url: URL, *, body: bytes, **more: Any) -> HttpAnswer:
        seen.append([state.spec.is_red for state in site.core.fleet.workers])
        return await fetch(url, body=body, **more)

    site.fetch = noticed  # type: ignore[method-assign]
    await site.parity.once()
    assert seen[0] == [True, True]


@on_loop
async def test_the_same_verdict_again_is_no_news() -> None:
    """Of workers that cannot be compared there is one each second."""
    site = Site()
    site.trouble = "the index does not answer"
    await site.parity.once()
    version = site.core.fleet.version
    await site.parity.once()
    assert site.worker.parity == site.trouble
    assert site.core.fleet.version == version


@on_loop
async def test_part_of_a_probe_is_not_enough() -> None:
    site = Site()
    compute = site.compute

    def first_only(body: bytes) -> list[bytes]:
        made = compute(body)
        site.stored.difference_update(made[1:])
        return made

    site.compute = first_only  # type: ignore[method-assign]
    await site.parity.once()
    assert "the index shows 1 of" in site.worker.parity


@pytest.mark.parametrize("key", ["", "key-of-the-engine"])
@pytest.mark.parametrize("body", [b"", b"{}"])
def test_the_routers_own_requests_carry_the_engines_key(key: str, body: bytes) -> None:
    heads: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async def scenario() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            engines = EngineHttp(None, key)
            url = URL(f"http://127.0.0.1:{port}/v1/models")
            assert (await engines.fetch(url, body=body, bytes_max=1)).status == 200
            engines.close()

    asyncio.run(scenario())
    (head,) = heads
    assert head.startswith("POST" if body else "GET")
    assert ("Authorization" in head) == bool(key)
    assert (f"Authorization: Bearer {key}\r\n" in head) == bool(key)


@pytest.mark.parametrize(("misses", "is_known"), [(2, False), (1, True)])
@on_loop
async def test_more_cached_tokens_than_expected_make_up_for_no_miss(
    misses: int, *, is_known: bool
) -> None:
    """Of three answers so many miss all that was expected, and the others have ten times that."""
    site = Site()
    site.worker.has_parity = True
    for number in range(120):
        cached = 0 if number % 3 < misses else 1000
        site.parity.observed(site.worker, "m", 100, cached)
    assert site.worker.has_parity == is_known


@pytest.mark.parametrize("space", ["", SPACE.hex()])
@on_loop
async def test_hits_that_the_engine_does_not_have_make_it_load_only(space: str) -> None:
    """One whose space a flag has to say may hash ahead: it has no connector."""
    site = Site()
    await site.parity.once()
    site.worker.address = msgspec.structs.replace(site.worker.address, space=space)

    def is_red_after(cached: int, count: int) -> bool:
        for _ in range(count):
            site.parity.observed(site.worker, "m", 100, cached)
        (state,) = site.core.fleet.workers
        return state.spec.is_red

    assert not is_red_after(90, 200)
    assert is_red_after(10, 40)
    assert "of the tokens that the index" in site.worker.parity
    assert (parity.AHEAD in site.worker.parity) == bool(space)


@on_loop
async def test_an_adapter_is_load_only_by_itself() -> None:
    site = Site()
    adapter = site.worker.adapters["lora"] = WorkerAdapter("m", "/lora")
    adapter.is_wanted = True
    await site.parity.once()
    assert adapter.parity == parity.UNSAID, "its engine said no digest"
    adapter.parity, adapter.has_parity = "", True
    for _ in range(120):
        site.parity.observed(site.worker, "lora", 100, 10)
    assert "of the tokens that the index showed" in adapter.parity
    assert not adapter.has_parity
    assert (site.worker.parity, site.worker.has_parity) == ("", True)


@on_loop
async def test_an_adapter_with_other_weights_gets_other_keys() -> None:
    site, digest = Site(), b""
    fetch = site.fetch

    async def reporting(url: URL, *, body: bytes, **more: Any) -> HttpAnswer:
        if url.path.endswith("/render") or msgspec.json.decode(body)["model"] != "lora":
            return await fetch(url, body=body, **more)
        for ids in _prompts(body):
            its = ("lora", "/lora")
            made = block_keys(ids, block_tokens=BLOCK, seed=SEED, adapter=its)
            site.stored.update(adapter_keys(made, digest))
        params = {"kvstore": {"adapter": digest.hex()}}
        return HttpAnswer(200, [], msgspec.json.encode({"kv_transfer_params": params}))

    site.fetch = reporting  # type: ignore[method-assign]
    adapter = site.worker.adapters["lora"] = WorkerAdapter("m", "/lora")
    adapter.is_wanted = True
    for digest in (b"d" * 32, b"e" * 32):  # they are loaded anew, under the same name and path
        adapter.compared_again_s = 0.0
        await site.parity.once()
        assert adapter.has_parity
        scope = site.spaces.scope("lora")
        assert scope is not None
        assert scope.plan.digest == digest


@on_loop
async def test_the_worst_trust_in_several_prompts_counts() -> None:
    site = Site()
    await site.parity.once()
    site.trusts = itertools.cycle([Trust.EXACT, Trust.STALE])
    answer = (await site.job("team-a", prompt=PROMPTS[2])).request.answer
    assert answer is not None
    assert answer.trust is Trust.STALE
    assert {each.trust for each in answer.matches} == {Trust.STALE}


ENGINES = ("", "e1", "e2")


@pytest.mark.parametrize(("engine", "expected"), [("", 2), ("e1", 3), ("e2", 5)])
def test_only_blocks_of_its_node_and_of_itself_are_expected_of_an_engine(
    engine: str, expected: int
) -> None:
    matches = [
        Match(Holder("n1", each), blocks, 0, 0, Trust.EXACT)
        for each, blocks in zip(ENGINES, (2, 3, 5), strict=True)
    ]
    matches.append(Match(Holder("n2"), 9, 9, 9, Trust.EXACT))
    answer = PrefixAnswer(trust=Trust.EXACT, matches=matches, peers=frozenset(), epoch=1)
    worker = WorkerAddress(name="a", url="http://a", node="n1", engine=engine)
    found = Prefix(100, b"", BLOCK, answer)
    assert predicted_tokens(found, worker) == BLOCK * expected
    other = msgspec.structs.replace(found, load_only={"a": "its adapter is another"})
    assert predicted_tokens(other, worker) == 0
