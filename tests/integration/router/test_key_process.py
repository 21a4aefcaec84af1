"""The process that makes tokens and keys: answers in order, and what its faults cost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import uvloop

from kvstore.demo import models
from kvstore.index.chain import block_keys
from kvstore.router.keys import process
from kvstore.router.keys.child import KeyOrder, KeyPlan, Tokenizers, answer_to
from kvstore.router.keys.process import KeyProcess
from kvstore.testing.process import stop_process
from tests.kit.coroutines import on_loop


def order(count: int, **more: object) -> KeyOrder:
    body = json.dumps({"prompt": list(range(count))}).encode()
    return msgspec.structs.replace(KeyOrder(body=body, plan=KeyPlan(4, "s")), **more)


def keys(count: int) -> bytes:
    return b"".join(block_keys(range(count), block_tokens=4, seed="s"))


@contextlib.asynccontextmanager
async def key_process() -> AsyncIterator[KeyProcess]:
    """Without a tokenizer."""
    keeper = KeyProcess({})
    try:
        yield keeper
    finally:
        await keeper.close()


async def answered(keeper: KeyProcess) -> None:
    """Until a child has started and answers."""
    async with asyncio.timeout(30):
        while (answer := await keeper.make(order(8))) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert answer.keys == keys(8)


@pytest.fixture(scope="module")
def _pipe_of_uvloop() -> None:
    """The first child of any uvloop opens a pipe that stays open for the whole process."""

    async def one_child() -> None:
        await (await asyncio.create_subprocess_exec("true")).wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(one_child())


@pytest.mark.usefixtures("_pipe_of_uvloop")
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_orders_are_answered_in_order_and_a_child_that_died_between_them_is_replaced(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """uvloop, on which routers run, has another error for a write to it: every later order waited
    in vain."""

    async def scenario() -> None:
        async with key_process() as keeper:
            answers = await asyncio.gather(*(keeper.make(order(n)) for n in range(4, 60, 5)))
            assert [a and a.keys for a in answers] == [keys(n) for n in range(4, 60, 5)]
            child = await keeper.lanes[0].running()
            child.kill()
            await child.wait()
            assert child.stdin is not None
            with contextlib.suppress(OSError):
                await child.stdin.wait_closed()
            await answered(keeper)
            assert await keeper.lanes[0].running() is not child

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())


@on_loop
async def test_a_hanging_child_costs_time_outs_and_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "ANSWER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(process, "HANG_S", 4.0)
    monkeypatch.setattr(process, "BYTES_MAX", 4 * len(order(8).body))

    async with key_process() as keeper:
        await answered(keeper)
        stop_process((await keeper.lanes[0].running()).pid)
        asked = [asyncio.create_task(keeper.make(order(8))) for _ in range(4)]
        done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 2, "a tenant owes half of BYTES_MAX at most"
        assert await asyncio.gather(*asked) == [None] * 4
        await answered(keeper)


@pytest.mark.parametrize(("loading_s", "is_replaced"), [(300.0, False), (0.0, True)])
@on_loop
async def test_a_child_that_loads_has_longer(
    monkeypatch: pytest.MonkeyPatch, loading_s: float, is_replaced: bool
) -> None:
    """On a busy machine it took longer than a child may hang: it was killed each time."""
    monkeypatch.setattr(process, "ANSWER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(process, "HANG_S", 0.0)
    monkeypatch.setattr(process, "LOADING_S", loading_s)

    async with key_process() as keeper:
        child = await keeper.lanes[0].running()
        stop_process(child.pid)
        assert await keeper.make(order(8)) is None
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGCONT)
        monkeypatch.setattr(process, "LOADING_S", 300.0)
        await answered(keeper)
        assert (await keeper.lanes[0].running() is not child) == is_replaced


@on_loop
async def test_a_comparison_waits_for_a_child_that_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request waits for it: on a busy machine each comparison was late, and workers stayed
    load-only."""
    monkeypatch.setattr(process, "ANSWER_TIMEOUT_S", 0.0)

    async with key_process() as keeper:
        assert await keeper.make(order(8)) is None, "a request does not wait"
        made = await keeper.make(order(8), delays_request=False)
        assert made is not None
        assert made.keys == keys(8)


@on_loop
async def test_a_child_that_hangs_in_a_comparison_is_replaced_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "LOADING_S", 0.2)

    async with key_process() as keeper:
        stop_process((await keeper.lanes[0].running()).pid)
        assert await keeper.make(order(8), delays_request=False) is None
        monkeypatch.setattr(process, "LOADING_S", 300.0)
        monkeypatch.setattr(process, "HANG_S", 0.0)
        made = await keeper.make(order(8), delays_request=False)
        assert made is not None, "the next child has as long to load"
        assert made.keys == keys(8)


LONG = 400_000
"""Token ids: 2.6 MB of JSON."""


@on_loop
async def test_long_prompts_of_one_tenant_make_no_other_wait() -> None:
    """Four bodies of 2 MB made everybody else's keys late by seconds."""
    async with key_process() as keeper:
        await answered(keeper)
        long = [asyncio.create_task(keeper.make(order(LONG), "a")) for _ in range(4)]
        short = [await keeper.make(order(n), "b") for n in range(4, 60, 5)]
        assert [a and a.keys for a in short] == [keys(n) for n in range(4, 60, 5)]
        assert not any(each.done() for each in long[1:]), "they take seconds"
        of_short, of_long = [await lane.running() for lane in keeper.lanes]
        of_long.send_signal(signal.SIGKILL)  # costs the one that it has
        await asyncio.gather(*long)
        assert await keeper.lanes[0].running() is of_short
        assert await keeper.lanes[1].running() is not of_long


@on_loop
async def test_what_is_owed_is_bounded_and_what_nobody_waits_for_is_not_owed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = KeyOrder(body=bytes(32 << 20))

    async with key_process() as keeper:
        lane = keeper.lanes[1]
        stop_process((await lane.running()).pid)
        asked = [asyncio.create_task(keeper.make(body, f"t{n % 4}")) for n in range(64)]
        done, rest = await asyncio.wait(asked, timeout=0.2)
        assert (len(done), len(rest)) == (62, 2)
        assert all(each.result() is None for each in done)
        for each in rest:
            each.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        assert not vars(keeper)["_owed"]
        again = asyncio.create_task(keeper.make(body, "t0"))
        await asyncio.sleep(0)
        assert not again.done(), "there is room again"
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)


@on_loop
async def test_the_tenant_that_got_the_fewest_bytes_is_next() -> None:
    loop, queue = asyncio.get_running_loop(), process.FairQueue()

    def put(tenant: str, size: int) -> process.Waiting:
        found = process.Waiting(tenant, size, KeyOrder(), loop.create_future())
        queue.put(found)
        return found

    for _ in range(6):
        put("a", 100)
    taken = [queue.take() for _ in range(2)]
    put("b", 10)
    gone = put("b", 10)
    for _ in range(12):
        put("b", 10)
    gone.asked.cancel()
    taken += [queue.take() for _ in range(10)]
    assert queue.take() is not None
    while queue.take() is not None:
        pass
    assert "".join([each.tenant for each in taken if each is not None]) == "aa" + 10 * "b", (
        "until it has got as much"
    )


@pytest.mark.parametrize(
    ("given", "count"),
    [
        (KeyOrder(rendered=b'{"token_ids": [1, 2, 3], "x": 1}'), 3),
        (KeyOrder(rendered=b'[{"token_ids": [1, 2]}]'), 2),
        (KeyOrder(rendered=b'[{"token_ids": [1]}, {"token_ids": [2]}]'), None),
        (KeyOrder(rendered=b'{"error": 1}'), None),
        (KeyOrder(rendered=b"{"), None),
        (KeyOrder(body=b'{"prompt": ["a", "b"]}'), None),
        (KeyOrder(body=b'{"prompt": [[1], [2]]}'), None),
        (KeyOrder(body=b'{"prompt": [1, 2, 3, 4]}'), 4),
        (KeyOrder(model="unknown", body=b'{"prompt": "x"}'), None),
    ],
)
def test_one_prompt_has_tokens_and_all_else_has_none(given: KeyOrder, count: int | None) -> None:
    answer = answer_to(given, Tokenizers({}))
    assert (answer.token_count, bool(answer.why)) == (count or 0, count is None)


@pytest.mark.engine  # transformers
def test_texts_have_tokens_and_a_header_that_changes_is_left_to_the_engine(tmp_path: Path) -> None:
    models._write_tokenizer(tmp_path, models.MEDIUM)
    tokenizers = Tokenizers({"m": str(tmp_path)})

    def count(**fields: object) -> int:
        body = json.dumps({"model": "m", **fields}).encode()
        return answer_to(KeyOrder(model="m", body=body), tokenizers).token_count

    hello = [{"role": "user", "content": "hello"}]
    assert count(prompt="hello") > 0
    assert count(messages=hello, temperature=0.5) > count(prompt="hello")
    header = "x-anthropic-billing-header: cch=1;"
    assert count(messages=[{"role": "system", "content": f"Hi. {header}"}]) > 0
    assert count(messages=[{"role": "system", "content": header}]) == 0
    assert count(messages=[{"role": "user", "content": ["hello"]}]) == 0
    assert count(prompt=["hello"]) == 0
