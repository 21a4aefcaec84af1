"""What an operator sees of a cluster: two real nodes, the commands as he types them."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest

from kvstore.cli.top import of_index
from kvstore.client.index import IndexClient
from kvstore.index.chain import block_keys
from kvstore.index.feed import Trust
from kvstore.testing.process import Lab
from kvstore.testing.raw_engine import BLOCK_BYTES, BLOCK_TOKENS, RawEngine, make_keys
from kvstore.wire.messages import Story
from tests.integration.cluster.kit import CONVERGES_S
from tests.integration.node.conftest import eventually
from tests.kit.command import kvstore
from tests.kit.peers import PeerPair, metric
from tests.kit.processes import IndexProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = [(n * 7919) % 50_000 for n in range(BLOCK_TOKENS * 12 + 3)]
KEYS: list[bytes] = list(block_keys(TOKENS, block_tokens=BLOCK_TOKENS, seed="0"))
STORED = 10


class System(NamedTuple):
    """Node b holds a prompt's beginning, an engine of node a may ask for it."""

    pair: PeerPair
    there: RawEngine
    here: RawEngine
    asks: tuple[str, ...]
    folder: Path


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("look")
    with (
        PeerPair.start(folder, transport="tcp") as pair,
        RawEngine(pair.b.socket, engine_id="b", timeout_s=60) as there,
        RawEngine(pair.a.socket, engine_id="a", timeout_s=60) as here,
    ):
        there.open()
        here.open()
        there.store(KEYS[:STORED])
        there.release(there.lease_stored(KEYS[:STORED]))
        asks = ("--index", pair.a.index, *Lab(folder).flags("client", "ops"))
        with IndexClient([pair.a.index], tls=Lab(folder).files("client", "ops")) as index:
            # Until then more may be there, and commands say so.
            assert eventually(lambda: index.nodes().trust is Trust.EXACT, timeout_s=CONVERGES_S)
        yield System(pair, there, here, asks, folder)


def asked(*arguments: str) -> dict[str, Any]:
    done = kvstore(*arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_prefix_says_how_far_each_node_goes(system: System) -> None:
    (system.folder / "prompt.json").write_text(json.dumps(TOKENS))
    (system.folder / "keys").write_text("\n".join(key.hex() for key in KEYS))
    where = ("inspect", "prefix", "--socket", str(system.pair.a.socket), *system.asks)
    by_tokens = (*where, "--tokens-file", str(system.folder / "prompt.json"))
    by_keys = (*where, "--keys-file", str(system.folder / "keys"))

    def holders(arguments: tuple[str, ...]) -> dict[str, int]:
        rows = asked(*arguments)["prefix"]["holders"]
        return {row["node"]: row["dram_blocks"] for row in rows}

    assert eventually(lambda: holders(by_tokens).get("b") == STORED, timeout_s=CONVERGES_S)
    found = asked(*by_keys)["prefix"]
    assert found["held_tokens"] == STORED * BLOCK_TOKENS
    assert (found["asked_blocks"], found["label"]) == (len(KEYS), "model")
    shown = kvstore(*by_tokens, columns="80")
    assert shown.returncode == 0
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert ["b", "-", "exact", "0", str(STORED), str(STORED)] in rows
    assert max(map(len, shown.stdout.splitlines())) <= 200
    assert not any(key.hex()[:8] in shown.stdout for key in KEYS)


def test_nodes_of_the_index_need_no_node_here(system: System) -> None:
    rows = asked("inspect", "nodes", *system.asks)["members"]
    assert [(row["node"], row["trust"]) for row in rows] == [("a", "exact"), ("b", "exact")]

    def engines() -> list[tuple[int, str]]:
        rows = asked("inspect", "nodes", *system.asks)["members"]
        return [(row["engines"], row["models"]) for row in rows]

    assert eventually(lambda: engines() == [(1, "model")] * 2, timeout_s=CONVERGES_S)
    shown = kvstore("inspect", "nodes", *system.asks)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "exact" in shown.stdout


def test_explain_names_the_node_and_how_long_it_took(system: System) -> None:
    here, a = system.here, system.pair.a
    reply = system.pair.fetch(here, KEYS[:STORED])
    here.release(reply)
    missing = make_keys(2, seed="nobody stored these")
    other = here.lease(missing)
    here.release(other)
    stories = {"came": (reply, STORED, STORED), "did-not": (other, len(missing), 0)}
    for request, (lease, blocks, loaded) in stories.items():
        told = Story(
            request=request,
            prompt_tokens=blocks * BLOCK_TOKENS,
            loaded_tokens=loaded * BLOCK_TOKENS,
            peer_tokens=loaded * BLOCK_TOKENS,
            outcome="" if loaded else "not stored",
            session=here.session,
            leases=[lease.lease],
        )
        assert here.scheduler.send(told)

    def rows(request: str) -> list[dict[str, Any]]:
        done = kvstore("explain", request, "--json", "--socket", str(a.socket))
        return json.loads(done.stdout)["requests"][0]["ranges"] if not done.returncode else []

    assert eventually(lambda: bool(rows("did-not")), timeout_s=CONVERGES_S)
    (came,) = rows("came")
    assert (came["blocks"], came["tier"], came["node"]) == (STORED, "peer", "b")
    assert re.fullmatch(
        rf"loaded, after it was fetched from node b: {STORED} blocks in [\d.]+ m?s", came["text"]
    )
    (missed,) = rows("did-not")
    assert (missed["reason"], missed["sought"]) == ("never stored", "nobody has it")
    shown = kvstore("explain", "came", "--socket", str(a.socket))
    assert f"{STORED * BLOCK_TOKENS} from other nodes" in shown.stdout
    header, row = shown.stdout.splitlines()[-2:]
    assert header.split() == ["blocks", "tokens", "tier", "node", "missed", "why"]
    assert row.split()[:5] == ["0-9", "0-159", "peer", "b", "-"]


def test_transfers_say_how_long_a_fetch_and_its_parts_took(system: System) -> None:
    keys = make_keys(STORED, seed="timed")
    system.there.store(keys)
    system.here.release(system.pair.fetch(system.here, keys))
    where = ("inspect", "transfers", "--socket", str(system.pair.a.socket))
    rows = {row["kind"]: row for row in asked(*where)["transfers"]}
    assert rows.keys() == {"ask", "move", "verify", "fetch"}
    for row in rows.values():
        assert (row["backend"], row["count"] >= 1) == ("tcp", True)
        assert 0 < row["p50_us"] <= row["p95_us"] <= row["p99_us"]
    assert rows["fetch"]["p50_us"] >= rows["move"]["p50_us"]
    assert rows["move"]["size_bytes"] == rows["fetch"]["size_bytes"] >= STORED * BLOCK_BYTES
    shown = kvstore(*where)
    assert (shown.returncode, shown.stderr) == (0, "")
    header = next(line.split() for line in shown.stdout.splitlines() if "p50" in line)
    assert {"p50", "p95", "p99"} <= {word.split("_")[0] for word in header}
    there = asked("inspect", "transfers", "--socket", str(system.pair.b.socket))
    assert there["transfers"] == [], "it only served"


def test_top_shows_a_node_and_all_nodes_what_they_do(system: System) -> None:
    node = str(system.pair.b.socket)
    (one,) = asked("top", "--socket", node, "--interval", "0.5")["processes"]
    state = one["state"]
    assert (one["place"], state["name"], state["facts"]["engines"]) == (node, "b", 1)
    assert state["tiers"][0]["capacity_bytes"] == 64 << 20
    assert one["rates"].keys() == state["flows"].keys() >= {"stored_bytes", "blocks_hit"}
    with IndexClient([system.pair.a.index], tls=Lab(system.folder).files("client", "ops")) as index:

        def has_come() -> bool:  # earlier heartbeats know nothing of blocks yet
            labels = '{model="model",tenant="default"}'
            stored = metric(system.pair.b, "kvstore_stored_bytes_total", labels)
            return bool(of_index(index)["flows"]["stored_bytes"] == stored)

        assert eventually(has_come, timeout_s=CONVERGES_S)
        rows = {row["node"]: row for row in of_index(index)["nodes"]}
    assert rows["b"]["engines"] == 1
    assert rows["b"]["dram_used_bytes"] >= STORED * BLOCK_BYTES
    shown = kvstore("top", "--once", *system.asks, columns="80")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert [line.split()[:2] for line in shown.stdout.splitlines() if line[:2] in ("a ", "b ")] == [
        ["a", "exact"],
        ["b", "exact"],
    ]


def test_top_leaves_the_terminal_as_it_was(system: System) -> None:
    for end in (b"q", b"\x03", signal.SIGTERM, signal.SIGHUP):
        with Terminal(("top", *system.asks, "--interval", "0.5")) as terminal:
            before = terminal.settings()
            assert terminal.shows(b"exact")
            assert terminal.settings() != before, "keys are not shown meanwhile"
            if isinstance(end, bytes):
                terminal.type(end)
            else:
                terminal.process.send_signal(end)
            assert terminal.ends() == (0 if isinstance(end, bytes) else 128 + end)
            assert terminal.settings() == before
            assert terminal.seen.rindex(b"\x1b[?1049l") > terminal.seen.rindex(b"\x1b[?1049h")
            assert b"Traceback" not in terminal.seen


def test_top_waits_for_an_index_that_is_not_there(tmp_path: Path) -> None:
    with IndexProcess.start(tmp_path) as index:
        address = index.address
    with Terminal(("top", "--index", address, "--insecure", "--interval", "0.5")) as terminal:
        assert terminal.shows(b"the index did not answer")
        with IndexProcess.start(tmp_path, listen=address):
            terminal.seen = b""
            assert eventually(
                lambda: terminal.draws_without(b"did not answer"), timeout_s=CONVERGES_S
            )
        terminal.seen = b""
        assert terminal.shows(b"the index did not answer"), "and it goes on when that ends"
        terminal.type(b"q")
        assert terminal.ends() == 0
        assert b"Traceback" not in terminal.seen


class Terminal:
    """A program on a terminal of 80 columns. Use as a context."""

    def __init__(self, arguments: tuple[str, ...]) -> None:
        self._fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.seen = b""
        self._theirs = theirs
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvstore.cli.main", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "xterm", "PYTHONSAFEPATH": "1"},
        )

    def settings(self) -> list[Any]:
        return termios.tcgetattr(self._theirs)

    def type(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def shows(self, text: bytes) -> bool:
        """Whether it comes to print this."""
        while text not in self.seen and select.select([self._fd], [], [], CONVERGES_S)[0]:
            self.seen += os.read(self._fd, 1 << 16)
        return text in self.seen

    def draws_without(self, text: bytes) -> bool:
        """Whether the last whole screen has no such text."""
        if select.select([self._fd], [], [], CONVERGES_S)[0]:
            self.seen += os.read(self._fd, 1 << 16)
        screens = self.seen.split(b"kvstore top,")[1:-1]
        return bool(screens) and text not in screens[-1]

    def ends(self) -> int:
        """What it prints is read until it has ended."""
        while self.process.poll() is None:
            if select.select([self._fd], [], [], 0.1)[0]:
                self.seen += os.read(self._fd, 1 << 16)
        while select.select([self._fd], [], [], 0)[0]:
            self.seen += os.read(self._fd, 1 << 16)
        return self.process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for fd in (self._fd, self._theirs):
            os.close(fd)
