"""A router process that ends, or has too few descriptors: no request is refused for it."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import resource
import shlex
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.testing.process import READY_TIMEOUT_S, STOP_TIMEOUT_S, RouterProcess, start_ready
from tests.kit.router_thread import ASK, WAIT_S, ask, until
from tests.kit.scripted_worker import ScriptedWorker

DESCRIPTORS = 256
ROOM = DESCRIPTORS // 4
"""Clients of a router with so many."""
ENDLESS = {"pieces": 1_000_000, "pause_s": 0.1}
DONE = b"data: [DONE]\n\n"


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[ScriptedWorker]:
    with ScriptedWorker.start(tmp_path, "a") as started:
        yield started


@contextlib.contextmanager
def serving(directory: Path, *workers: ScriptedWorker, flags: str) -> Iterator[RouterProcess]:
    named = [text for each in workers for text in ("--worker", each.flag)]
    with RouterProcess.start(directory, [*named, *flags.split()]) as router:
        router.await_worker()
        yield router


class Client(contextlib.AbstractContextManager["Client"]):
    """One kept connection, or a stream over it."""

    def __init__(self, router: RouterProcess) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=60)
        self.connection.connect()
        self._socket = self.connection.sock
        self._stream: http.client.HTTPResponse | None = None

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()
        self.connection.close()

    def ask(self) -> int:
        headers = {"Content-Type": "application/json"}
        self.connection.request("POST", "/v1/completions", json.dumps(ASK), headers)
        with self.connection.getresponse() as answer:
            answer.read()
            return answer.status

    def begin(self) -> None:
        """A stream, until its first piece has come."""
        headers = {"Content-Type": "application/json"}
        body = json.dumps({**ASK, "stream": True})
        self.connection.request("POST", "/v1/completions", body, headers)
        self._stream = self.connection.getresponse()
        assert self._stream.status == 200
        self.goes_on()

    def goes_on(self) -> None:
        """The stream does: waits for the next piece."""
        assert self._stream is not None
        assert self._stream.readline().startswith(b"data: ")
        assert self._stream.readline() == b"\n"

    def rest(self) -> bytes:
        """All that comes, be it cut."""
        assert self._stream is not None
        with contextlib.suppress(http.client.IncompleteRead, ConnectionError):
            return self._stream.read()
        return b""

    def was_closed(self) -> bool:
        """Waits for the router to close it."""
        self._socket.settimeout(WAIT_S)
        return self._socket.recv(1) == b""


def page(router: RouterProcess) -> tuple[int, str]:
    url = router.metrics_url.replace("/metrics", "/healthz")
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return 200, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def is_ready(router: RouterProcess) -> bool:
    return ask(router.port, path="/health", method="GET")[0] == 200


def is_refused(router: RouterProcess) -> bool:
    try:
        ask(router.port, path="/livez", method="GET")
    except ConnectionError:
        return True
    return False


def count(router: RouterProcess, name: str) -> float:
    with urllib.request.urlopen(router.metrics_url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}[ {{]", line))


# ── SIGTERM ──────────────────────────────────────────────────────────────────────────────────────


def test_a_router_that_drains_is_not_ready_and_serves_until_a_second_signal(
    worker: ScriptedWorker, tmp_path: Path
) -> None:
    worker.script("ok", **ENDLESS)
    with (
        serving(tmp_path, worker, flags="--drain-delay 600") as router,
        Client(router) as kept,
        Client(router) as stream,
    ):
        stream.begin()
        assert (is_ready(router), page(router)[0]) == (True, 200)
        router.process.send_signal(signal.SIGTERM)
        until(lambda: not is_ready(router))
        assert page(router) == (503, "it drains, to end\n")
        assert ask(router.port, path="/livez", method="GET")[0] == 200
        assert [ask(router.port)[0] for _ in range(3)] == [200] * 3, "over new connections"
        assert kept.ask() == 200
        stream.goes_on()
        assert router.process.poll() is None
        assert router.stop() == 0, "the second signal"
        assert DONE not in stream.rest(), "which ends what is under way"
    until(lambda: worker.seen()["aborted"] == 1)


def test_streams_end_after_the_delay_and_then_the_process(
    worker: ScriptedWorker, tmp_path: Path
) -> None:
    worker.script("ok", pieces=1000, pause_s=0.1)
    with (
        serving(tmp_path, worker, flags="--drain-delay 1") as router,
        Client(router) as idle,
        Client(router) as stream,
    ):
        stream.begin()
        assert idle.ask() == 200
        router.process.send_signal(signal.SIGTERM)
        until(lambda: is_refused(router))
        assert idle.was_closed()
        for _ in range(30):  # those of the delay, and of two seconds more
            stream.goes_on()
        assert router.process.poll() is None
        worker.script("ok")  # the pauses are over
        assert stream.rest().endswith(DONE)
        assert router.process.wait(STOP_TIMEOUT_S) == 0
    assert worker.seen()["aborted"] == 0


def test_a_stream_that_never_ends_is_cut_after_the_time_limit(
    worker: ScriptedWorker, tmp_path: Path
) -> None:
    worker.script("ok", **ENDLESS)
    with (
        serving(tmp_path, worker, flags="--drain-delay 0 --drain-timeout 1") as router,
        Client(router) as stream,
    ):
        stream.begin()
        begun_s = time.monotonic()
        assert router.stop() == 0
        assert time.monotonic() - begun_s >= 1
        assert DONE not in stream.rest()
    until(lambda: worker.seen()["aborted"] == 1)


# ── descriptors ──────────────────────────────────────────────────────────────────────────────────


def start_with_few(directory: Path, workers: list[ScriptedWorker]) -> RouterProcess:
    """A router whose hard limit of descriptors is DESCRIPTORS."""
    program, log = directory / "python", directory / "router.log"
    limited = f'#!/bin/sh\nulimit -n {DESCRIPTORS}\nexec {shlex.quote(sys.executable)} "$@"\n'
    program.write_text(limited, encoding="utf-8")
    program.chmod(0o700)
    named = [text for each in workers for text in ("--worker", each.flag)]
    process, line = start_ready(
        [
            *("-m", "kvstore.cli.main", "router", "--listen", "127.0.0.1:0"),
            *("--metrics", "127.0.0.1:0", "--drain-delay", "0", *named),
        ],
        log=log,
        says="kvstore router ready:",
        timeout_s=READY_TIMEOUT_S,
        python=program,
    )
    return RouterProcess(process, line, log)


def blames_nobody(router: RouterProcess) -> bool:
    """No worker has failed, and none was taken for down."""
    assert "worker a is down" not in router.log
    assert "breaker" not in router.log
    return count(router, "kvstore_router_worker_failures_total") == 0


def test_more_clients_than_descriptors_wait_and_all_are_served(tmp_path: Path) -> None:
    """300 slow requests at two engines; the router may have 256 descriptors."""
    with ScriptedWorker.start(tmp_path, "a") as a, ScriptedWorker.start(tmp_path, "b") as b:
        workers = [a, b]
        for each in workers:
            each.script("held")
        with (
            start_with_few(tmp_path, workers) as router,
            ThreadPoolExecutor(300) as pool,
        ):
            router.await_worker()
            limits = Path(f"/proc/{router.process.pid}/limits").read_text()
            (row,) = (line for line in limits.splitlines() if line.startswith("Max open files"))
            assert row.split()[3:5] == [str(DESCRIPTORS)] * 2
            answers = [pool.submit(ask, router.port, timeout_s=120.0) for _ in range(300)]
            try:
                until(lambda: sum(each.seen()["running"] for each in workers) == ROOM)
                until(lambda: "every connection of clients is in use" in page(router)[1])
                assert page(router)[0] == 200, "it is ready"
                assert count(router, "kvstore_router_connections") == ROOM
                assert not any(each.done() for each in answers), "nobody is refused"
            finally:
                for each in workers:
                    each.script("ok", delay_s=0.05)
            assert [each.result()[0] for each in answers] == [200] * 300
            until(lambda: page(router) == (200, "ok\n"))
            assert blames_nobody(router)
            assert router.stop() == 0
        assert sum(each.seen()["requests"] for each in workers) == 300, "each of them once"


def test_a_router_without_descriptors_waits_for_some(
    worker: ScriptedWorker, tmp_path: Path
) -> None:
    """Neither a client nor an engine can be connected, and a stream goes on."""
    worker.script("ok", pieces=1000, pause_s=0.1)
    with (
        serving(tmp_path, worker, flags="--drain-delay 0") as router,
        Client(router) as kept,
        Client(router) as stream,
        ThreadPoolExecutor(30) as pool,
    ):
        stream.begin()
        pid, kind = router.process.pid, resource.RLIMIT_NOFILE
        before = resource.prlimit(pid, kind, (3, resource.prlimit(pid, kind)[1]))
        try:
            answers = [pool.submit(lambda: ask(router.port)[0]) for _ in range(20)]
            until(lambda: "no connection can be accepted: too many open files" in router.log)
            answers.append(pool.submit(kept.ask))
            stream.goes_on()
            assert not any(each.done() for each in answers[:20]), "they wait"
        finally:
            resource.prlimit(pid, kind, before)
        assert [each.result() for each in answers] == [200] * 21
        until(lambda: page(router) == (200, "ok\n"))
        assert blames_nobody(router)
        worker.script("ok")
        assert stream.rest().endswith(DONE)
