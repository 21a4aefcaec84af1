"""While a request waits in the router, its node brings the blocks: real nodes, scripted engine."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.client.index import IndexClient
from kvstore.index.chain import block_keys
from kvstore.router.ahead import Preparations
from kvstore.router.receipt_log import read_receipts
from kvstore.routing.core import RouterCore
from kvstore.routing.events import Prepare, PrepareReason, Shared
from kvstore.routing.policy import parse
from kvstore.routing.receipts import Receipt
from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import BLOCK_TOKENS, make_keys
from kvstore.wire.load import EngineLoad
from tests.integration.cluster.kit import CONVERGES_S, becomes, matches
from tests.integration.node.conftest import eventually
from tests.integration.router.test_keys import SEED, storing
from tests.kit.peers import attached
from tests.kit.router_thread import ASK, RouterThread, until
from tests.kit.scripted_worker import ScriptedWorker

BLOCKS = 16
POLICY = {
    "classes": {"interactive": {"rank": 0, "backlog_s": 0.05}},
    "ahead": {"tokens_min": 2 * BLOCK_TOKENS},
}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """It has the index and a disk; the engine that the router knows is there."""
    directory = tmp_path_factory.mktemp("node")
    peers = ("--peer-listen", "127.0.0.1:0", "--transport", "tcp", "--insecure")
    index = ("--index-listen", "127.0.0.1:0", "--node-name", "n1")
    flags = (*peers, *index, "--file", f"{directory}/disk:256MiB")
    with NodeProcess.start(directory, dram="16MiB", flags=flags) as started:
        yield started


class Waiting:
    """A router whose only worker is busy, by what another router says."""

    def __init__(self, router: RouterThread, log: Path) -> None:
        self.router, self._log = router, log
        self._answers: list[tuple[int, dict[str, str], bytes]] = []

    @classmethod
    @contextlib.contextmanager
    def start(cls, node: NodeProcess, worker: ScriptedWorker, directory: Path) -> Iterator[Waiting]:
        flag = f"{worker.flag},node=n1,block={BLOCK_TOKENS},seed={SEED}"
        core, log = RouterCore(parse(POLICY), seed=1), directory / "receipts"
        settings: dict[str, Any] = {"index": [node.index], "index_timeout": 500}
        with contextlib.ExitStack() as stack:
            stack.enter_context(storing(node, worker))
            with IndexClient([node.index], insecure=True) as client:
                until(lambda: any(each.engines for each in client.nodes(engines=True).nodes))
            router = stack.enter_context(
                RouterThread([flag], core=core, insecure=True, receipts=str(log), **settings)
            )
            until(lambda: router.router.workers["a"].has_parity)
            started = cls(router, log)
            started.connect()
            yield started

    @property
    def ahead(self) -> Preparations:
        assert self.router.router.ahead is not None
        return self.router.router.ahead

    def connect(self) -> None:
        """Until the node has answered once: its address and spaces may not be known yet."""
        hello = Prepare(0, "", "a", b"".join(make_keys(1, seed="hello")), PrepareReason.HOT)

        def is_answered() -> bool:
            before = sum(self.ahead.counts.values())
            self.router.on_loop(lambda: self.ahead.begin(hello))
            until(lambda: sum(self.ahead.counts.values()) > before)
            return any(result == "nothing" for _, result in self.ahead.counts)

        until(is_answered)

    def note(self, *loads: EngineLoad) -> None:
        self.router.on_loop(lambda: self.router.router.dispatcher.note(Shared("other", loads)))

    @contextlib.contextmanager
    def held(self, ids: list[int], **headers: str) -> Iterator[None]:
        """A request that is held until the context ends."""
        url = self.router.on_loop(lambda: self.router.router.workers["a"].address.url)
        self.note(EngineLoad(url, 0, 100_000, 0))
        body = ASK | {"prompt": ids}

        def ask() -> None:
            self._answers.append(self.router.ask(body, headers=headers))

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            until(lambda: self.router.on_loop(lambda: len(self.router.core.room.entries)) == 1)
            yield
        finally:
            self.note()
            thread.join(60)

    def answer(self) -> tuple[int, dict[str, str]]:
        status, headers, _ = self._answers.pop()
        return status, headers

    def receipt(self, request_id: str) -> Receipt:
        found: list[Receipt] = []

        def is_written() -> bool:
            if self._log.exists():
                found.extend(
                    each for each in read_receipts(self._log) if each.request_id == request_id
                )
            return bool(found)

        until(is_written)
        return found[0]


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """One router serves all tests here, and opens and closes channels to nodes when it needs them:
    what is left of a router is looked for by the other modules."""


@pytest.fixture(scope="module")
def waiting(node: NodeProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Waiting]:
    directory = tmp_path_factory.mktemp("router")
    with (
        ScriptedWorker.start(directory, "a") as worker,
        Waiting.start(node, worker, directory) as started,
    ):
        yield started


def prompt(first: int) -> tuple[list[int], list[bytes]]:
    """Token ids, and the keys of all their blocks."""
    ids = list(range(first, first + BLOCKS * BLOCK_TOKENS))
    return ids, [*block_keys(ids, block_tokens=BLOCK_TOKENS, seed=SEED)]


def test_blocks_on_disk_are_in_dram_when_the_request_goes(
    node: NodeProcess, waiting: Waiting
) -> None:
    ids, keys = prompt(1000)
    with attached(node.socket) as engine, IndexClient([node.index], insecure=True) as client:
        engine.store(keys)
        engine.release(engine.lease_stored(keys))
        numbers = iter(range(1000))

        def is_on_disk_only() -> bool:
            engine.store(make_keys(64, seed=f"filler {next(numbers)}"))
            found = matches(client, keys).get("n1")
            return found is not None and (found.dram_blocks, found.file_blocks) == (0, BLOCKS)

        assert eventually(is_on_disk_only, timeout_s=CONVERGES_S)
        with waiting.held(ids):
            assert becomes(client, keys, {"n1": BLOCKS})
            answer = engine.ask(keys)
            assert (len(answer.slots) // 4, answer.promoting) == (BLOCKS, 0)
            engine.release(answer)
    status, headers = waiting.answer()
    assert status == 200
    [prepared] = waiting.receipt(headers["x-request-id"]).outcome.prepared
    assert (prepared.worker, prepared.reason, prepared.blocks) == ("a", "waits", BLOCKS)
    assert (prepared.reading, prepared.sought, prepared.trouble) == (BLOCKS, 0, "")


def test_hints_are_acknowledged(waiting: Waiting) -> None:
    ids, _ = prompt(9000)
    hints = {"X-Kvstore-Pin-Ttl-S": "120", "X-Session-Id": "s", "X-Kvstore-Session-End": "1"}
    _, headers, _ = waiting.router.ask(ASK | {"prompt": ids}, headers=hints)
    assert headers["x-kvstore-pin"] == f"120; tokens={BLOCKS * BLOCK_TOKENS}"
    assert headers["x-kvstore-session"] == "ends"
    for wrong in ("-1", "nan", "1e9", "9" * 40, ""):
        _, headers, _ = waiting.router.ask(
            ASK | {"prompt": ids}, headers={"X-Kvstore-Pin-Ttl-S": wrong}
        )
        assert headers["x-kvstore-pin"] == "0; reason=invalid"
    _, headers, _ = waiting.router.ask(ASK | {"prompt": ids})
    assert "x-kvstore-pin" not in headers
