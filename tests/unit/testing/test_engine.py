"""The engine's client and launcher, where no engine is needed: what it sends, reads and reports."""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvstore.demo.engine import EngineError, VllmServer
from tests.kit.engines import EngineConfig, EngineServer


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers every POST with the text that the server object carries, and keeps the body."""

    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, AnsweringServer)
        server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(server.status)
        self.end_headers()
        self.wfile.write(server.text.encode())

    def log_message(self, *arguments: object) -> None:
        pass


class AnsweringServer(http.server.HTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.status = 200
        self.text = ""
        self.bodies: list[bytes] = []


@pytest.fixture
def answering() -> Iterator[AnsweringServer]:
    server = AnsweringServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def engine(answering: AnsweringServer, tmp_path: Path) -> Iterator[EngineServer]:
    process = psutil.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    engine = EngineServer(EngineConfig(model=tmp_path), process, tmp_path / "log")
    engine.port = answering.server_address[1]
    yield engine
    engine.kill()


def events(*chunks: object) -> str:
    return "".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + "data: [DONE]\n\n"


def chunk(*tokens: int) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": "?", "token_ids": list(tokens)}], "id": "x"}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}},
}


@pytest.mark.parametrize(
    ("status", "text", "message"),
    [
        (500, "out of order", "answered 500: out of order"),
        (200, events(chunk(1), {"error": {"message": "engine died"}}), "engine died"),
        (200, events(chunk(1)), "without a token or its usage"),
        (200, events(USAGE), "without a token or its usage"),
        (200, "data: {broken\n\n", "broke off"),
    ],
)
def test_an_answer_that_is_no_completion_is_an_error(
    engine: EngineServer, answering: AnsweringServer, status: int, text: str, message: str
) -> None:
    answering.status, answering.text = status, text
    with pytest.raises(EngineError, match=message):
        engine.complete((1,), max_tokens=1)


@pytest.mark.parametrize("status", [3, 255])
def test_a_server_that_ends_at_once_is_reported_with_its_log(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ("first", "ValueError: --this is wrong", "RuntimeError: See root cause above", "last")
    code = f"print(*{lines}, sep='\\n'); raise SystemExit({status})"
    monkeypatch.setattr(EngineConfig, "command", lambda _: [sys.executable, "-c", code])
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(EngineError, match=r"ended while starting: ValueError: --this is wrong"):
        VllmServer.start(EngineConfig(model=tmp_path), log=tmp_path / "log")
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_a_server_that_a_signal_ended_is_not_explained_by_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os; print('ValueError: of a request', flush=True); os.kill(os.getpid(), 9)"
    monkeypatch.setattr(EngineConfig, "command", lambda _: [sys.executable, "-c", code])
    with pytest.raises(EngineError, match=r"ended while starting: ended by SIGKILL \(log: /.*\)"):
        VllmServer.start(EngineConfig(model=tmp_path), log=tmp_path / "log")


def test_what_its_ranks_leave_in_shared_memory_is_removed_and_nothing_else(
    engine: EngineServer, tmp_path: Path
) -> None:
    mine, other = (f"vllm_dist_{uuid.uuid4().hex}" for _ in range(2))
    (tmp_path / "log").write_text(f"world_size=2 distributed_init_method=file:///tmp/{mine} x")
    paths = [Path("/dev/shm") / f"{name}-tp:0-[0-1]-cpushm_0" for name in (mine, other)]
    try:
        for path in paths:
            path.touch()
        engine.kill()
        assert [path.exists() for path in paths] == [False, True]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
