"""Every system call of the node's store and load paths fails once: the 1st, the 2nd, … until none
is left. SQLite's method; strace answers in the kernel's place.

One node lives through all of it. In each run an engine attaches, stores, reads back from dram and
reads from disk what dram has lost, while the n-th call of one kind fails in each of the node's
threads. Requests end, bytes are right or missing, and afterwards all works as if nothing had been.

Calls of which there are many fail in several places a run: n, n + EVERY, n + 2 × EVERY, …

No call here is fatal to the node. Those that would be by nature are not failed, or not with that
error: epoll_wait other than with EINTR, which is the loop itself; an eventfd other than with EINTR,
which is how threads wake each other and knows no other error; what the interpreter lives on (futex,
rt_sigaction, brk, clone). Start-up ends with one sentence (tests/integration/node/test_process.py).
fallocate, ftruncate and madvise are of start-up only.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import signal
import subprocess
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import make_keys
from tests.amounts import amount
from tests.integration.node.conftest import eventually
from tests.kit.actor import Failed, Look, State
from tests.kit.gauges import Gauges, descriptor_kinds, look, processes
from tests.kit.programs import need
from tests.kit.troupe import SplitEngine, Troupe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EVERY = amount(4, nightly=8)
RUNS_MAX = 16
"""A rare call fails one at a time, and is over before this."""
BATCH = 4
BLOCK_BYTES = 256 << 10
FILL = 16
TRIES = 30
"""A segment is not closed every time, and the space of six is reclaimed together."""
AGE = 20
"""Batches after which dram has lost one: 64 slots."""


class Call(NamedTuple):
    """One kind of system call."""

    names: str
    """As strace knows them; Python chooses which."""
    errors: str
    is_rare: bool


CALLS = [
    Call("pwritev,pwritev2", "EIO ENOSPC EINTR", is_rare=True),
    Call("preadv,preadv2", "EIO EINTR", is_rare=True),
    Call("fsync", "EIO ENOSPC", is_rare=True),
    Call("openat", "EMFILE EIO", is_rare=True),
    Call("unlinkat,unlink", "EIO", is_rare=True),
    Call("mmap", "ENOMEM", is_rare=True),
    Call("accept4", "EMFILE ENOMEM EINTR", is_rare=True),
    Call("recvmsg", "ENOMEM EINTR", is_rare=True),
    Call("getsockopt,setsockopt", "ENOMEM", is_rare=True),
    Call("epoll_ctl", "ENOMEM ENOSPC", is_rare=True),
    Call("sendmsg", "ENOMEM EINTR", is_rare=False),
    Call("recvfrom", "ENOMEM EINTR", is_rare=False),
    Call("epoll_wait", "EINTR", is_rare=False),
    Call("read", "EINTR", is_rare=False),
    Call("write", "EINTR", is_rare=False),
]


class Kit:
    """A node, an engine, and what was stored."""

    def __init__(self, node: NodeProcess, troupe: Troupe, directory: Path) -> None:
        self.node = node
        self.engine = SplitEngine(troupe, "engine", block_bytes=BLOCK_BYTES, rank_count=1)
        self._trace = directory / "trace"
        self._store = directory / "store"
        self._number = itertools.count()
        self._batches: deque[list[bytes]] = deque()
        self.verified = 0
        self.engine.attach(node.socket)
        self._fill_the_disk()
        for _ in range(AGE):
            self.store_whole()
        assert eventually(lambda: len(processes(node)) == 3, timeout_s=60), "no standby"
        self._descriptors = self.descriptors()

    def _fill_the_disk(self) -> None:
        """So far that segments are reclaimed from now on."""
        first, number = self._store / "seg-00000001.kv", itertools.count()
        self.store_whole()
        assert eventually(first.exists)

        def is_reclaimed() -> bool:  # what leaves dram before it is written is not written
            self.engine.store(make_keys(FILL, seed=f"fill {next(number)}"))
            return not first.exists()

        assert eventually(is_reclaimed, timeout_s=60), "nothing is ever reclaimed"

    def descriptors(self) -> list[Counter[str]]:
        """Of the process that serves; its supervisor's are told by the kill cycles."""
        return descriptor_kinds(self.node, without=self._store)[1:]

    def batch(self) -> list[bytes]:
        keys = make_keys(BATCH, seed=str(next(self._number)))
        self._batches.append(keys)
        return keys

    def store_whole(self) -> None:
        """With nothing failing all of it is stored, and read back."""
        keys = self.batch()
        assert self.engine.store(keys) == BATCH
        assert eventually(lambda: self.engine.verify(keys) == BATCH)

    def exercise(self) -> None:
        """Attach, store, read from dram, read from disk; nothing need succeed."""
        self.engine.introduce(self.node.socket, anew=True)
        if len(self.engine.attached) < len(self.engine.members) or isinstance(
            self.engine.open(wait_s=1.0), Failed
        ):
            return
        keys = self.batch()
        self.engine.store(keys)
        self.verified += self.engine.verify(keys)
        self.verified += self.engine.verify(self._batches.popleft())

    @contextlib.contextmanager
    def failing(self, call: str, error: str, when: str) -> Iterator[None]:
        """In each thread of the node, until the end."""
        pid = self.node.pid
        command = ["strace", "-f", "-qq", "-o", str(self._trace), "-p", str(pid)]
        command += ["-e", f"trace={call}", "-e", f"inject={call}:error={error}:when={when}"]
        strace = subprocess.Popen(command)
        try:
            assert eventually(lambda: _is_traced(pid) or strace.poll() is not None)
            assert strace.poll() is None, "strace could not attach"
            yield
            # A call that strace lets go of half way fails with ENOSYS, which no kernel would say.
            self.node.pause()
            looks = []

            def is_at_rest() -> bool:  # not just between a call's two stops
                looks.append(_is_stopped(pid))
                return all(looks[-2:]) and len(looks) > 1

            assert eventually(is_at_rest)
        finally:
            strace.send_signal(signal.SIGINT)
            strace.wait(20)
            self.node.resume()

    def calls(self) -> tuple[int, int]:
        """How many there were, and how many of them failed."""
        text = self._trace.read_text(errors="replace")
        lines = [line for line in text.splitlines() if " --- " not in line]  # no signals
        return len(lines), sum("(INJECTED)" in line for line in lines)

    def is_well(self) -> None:
        """The node lives, serves, and holds what one idle engine accounts for."""
        assert self.node.process.poll() is None, self.node.log[-2000:]
        self.engine.attach(self.node.socket)
        self.store_whole()
        seen: list[tuple[Gauges, object]] = []

        def at_rest() -> bool:
            known = self.engine.scheduler.ask(Look())
            now = look(self.node)
            seen.append((now, known))
            return isinstance(known, State) and (
                now.connections == len(self.engine.members)
                and (now.sessions, now.leases) == (1, 0)
                and (now.slots_quarantined, now.slots_leased) == (0, 0)
                and now.slots_granted == known.credits
                and self.descriptors() == self._descriptors
            )

        assert eventually(at_rest), (seen[-1], self.descriptors(), self._descriptors)

    def run(self, call: Call, error: str, n: int) -> bool:
        """One run; whether a call failed in it."""
        when = str(n) if call.is_rare else f"{n}+{EVERY}"
        with self.failing(call.names, error, when):
            for _ in range(TRIES):
                self.exercise()
                # The first fails, but for one that had begun before it was looked at.
                if eventually(lambda: self.calls()[n == 1] > 0, timeout_s=1.0):
                    break
        count, failed = self.calls()
        assert count, f"{call.names}: not called at all, nothing was tested"
        self.is_well()
        return failed > 0


def _is_traced(pid: int) -> bool:
    return not any("TracerPid:\t0\n" in status for status in _of_threads(pid))


def _is_stopped(pid: int) -> bool:
    return all("State:\tT" in status or "State:\tt" in status for status in _of_threads(pid))


def _of_threads(pid: int) -> list[str]:
    return [(task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    need("strace")
    directory = tmp_path_factory.mktemp("node")
    program = (str(Path(__file__).with_name("small_segments.py")),)
    flags = ("--file", f"{directory / 'store'}:64MiB")
    with (
        NodeProcess.start(directory, dram="16MiB", flags=flags, program=program) as node,
        Troupe() as troupe,
    ):
        yield Kit(node, troupe, directory)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.names)
def test_each_call_may_fail_once(kit: Kit, call: Call) -> None:
    runs: Counter[str] = Counter()
    for error in call.errors.split():
        for n in range(1, RUNS_MAX if call.is_rare else EVERY + 1):
            try:
                failed = kit.run(call, error, n)
            except (AssertionError, TimeoutError) as broken:
                where = f"{error} at call {n} of {call.names}"
                raise AssertionError(f"{where}: {broken}\n{kit.node.log[-3000:]}") from broken
            runs[error] += failed
            if call.is_rare and not failed:
                break
        else:
            assert not call.is_rare, f"{call.names}: more than {RUNS_MAX} in one run"
        assert runs[error], f"{call.names} never failed with {error}: nothing was tested"
    logging.getLogger(__name__).info("%s: failed in %s runs", call.names, dict(runs))
