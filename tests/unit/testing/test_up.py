"""`kvstore up`: flags, shares of GPUs, commands to try.

With real engines: `tests/integration/engine/test_up.py`.
"""

from __future__ import annotations

import math
import os
import shlex
import socket
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import click
import pytest
from rich.text import Text

from kvstore.cli.main import cli
from kvstore.demo import up
from kvstore.demo.engine import EngineError, VllmServer
from kvstore.errors import ConfigError
from kvstore.testing.process import NodeFailed, NodeProcess, reap, start_ready

NODE: Any = SimpleNamespace(
    directory=Path("/kept"),
    socket=Path("/kept/node.sock"),
    pid=77,
    supervisor_pid=76,
    metrics_url="http://127.0.0.1:9/metrics",
)
RUNNING: Any = SimpleNamespace(process=SimpleNamespace(poll=lambda: None))
"""A node or a router that goes on."""
ROUTER: Any = SimpleNamespace(url="http://127.0.0.1:8", metrics_url="http://127.0.0.1:7/metrics")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["a", "b"], "unexpected extra argument (b)"),
        (["--engines", "0"], "'--engines': 0 is not in the range x>=1"),
        (["--port", "65536"], "'--port': 65536 is not in the range 0<=x<=65535"),
        (["--dtype", "auto"], "No such option '--dtype'"),
    ],
)
def test_wrong_words_are_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(click.UsageError) as refused:
        cli(["up", *words], standalone_mode=False)
    assert sentence in refused.value.format_message()


@pytest.mark.parametrize("model", [[], ["org/name"]])
def test_words_behind_two_dashes_are_of_the_engines(
    model: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, object]] = []
    monkeypatch.setattr("kvstore.cli.main.DEMO_NEEDS", ())
    monkeypatch.setattr(up, "main", lambda **flags: given.append(flags))
    with pytest.raises(SystemExit):
        cli(["up", *model, "--engines", "1", "--", "--dtype", "auto"], standalone_mode=False)
    (flags,) = given
    assert (flags["model"], flags["engines"]) == (next(iter(model), None), 1)
    assert flags["flags"] == ["--dtype", "auto"]


@pytest.mark.parametrize(
    ("engines", "gpus", "shares"),
    [
        (2, ["0", "1", "2", "3"], ["0,1", "2,3"]),
        (2, ["0", "1", "2"], ["0", "1"]),
        (1, ["GPU-7a"], ["GPU-7a"]),
        (2, ["0"], ["", ""]),
        (2, [], ["", ""]),
    ],
)
def test_each_engine_has_an_equal_share_of_the_gpus(
    engines: int, gpus: list[str], shares: list[str]
) -> None:
    assert up.gpus_of_engines(engines, gpus) == shares


def test_gpus_are_counted_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert up.gpus_here(tmp_path) == ["2", "10"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert up.gpus_here(tmp_path) == ["3", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert up.gpus_here(tmp_path) == [], "hidden from this process, and so from its engines"


def test_a_model_of_the_users_runs_as_vllm_would_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "9")
    one, two = up.engine_configs("org/name", 2, ["--dtype", "auto"], tmp_path / "node.sock")
    assert [c.full_environment()["CUDA_VISIBLE_DEVICES"] for c in (one, two)] == ["4", "5"]
    assert one.full_environment()["VLLM_CPU_KVCACHE_SPACE"] == "9"
    assert one.full_environment().get("HF_HUB_OFFLINE") == os.environ.get("HF_HUB_OFFLINE")
    words = one.command()
    assert words[words.index("--model") + 1] == words[words.index("--served-model-name") + 1]
    assert words[words.index("--dtype") + 1] == "auto"
    assert "--enable-scale-out" in words, "or the router does not see a prompt's tokens"
    assert one.full_environment()["VLLM_RPC_BASE_PATH"] == str(tmp_path), "its sockets stay there"
    assert not {"--enforce-eager", "--max-model-len", "--max-num-seqs"} & set(words)


def test_the_commands_to_try_are_those_of_the_program(tmp_path: Path) -> None:
    mine = [
        shlex.split(command)[1:]
        for _, command in up.commands_to_try(ROUTER, [8, 9], NODE, tmp_path / "r.json", "/x y:1GiB")
        if "kvstore " in command and not command.startswith("curl")
    ]
    shown = [c for _, c in up.commands_to_try(ROUTER, [8], NODE, tmp_path / "r.json", None)]
    assert {"http://127.0.0.1:9/", "http://127.0.0.1:7/"} < {*shown}
    assert next(words for words in mine if words[0] == "doctor")[-2:] == ["--file", "/x y:1GiB"]
    assert {words[0] for words in mine} <= set(cli.commands)
    for words in mine:
        cli.commands[words[0]].make_context(words[0], words[1:]).close()
    assert len(mine) >= 4


def test_a_taken_port_is_said_before_engines_start() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"port {port} is taken .*give another --port"):
            up.refuse_taken_port(port)
    up.refuse_taken_port(0)


class Ending:
    """An engine that ends when it has been waited for so many times."""

    def __init__(self, waits: int) -> None:
        self.waits = waits

    def wait(self, _: float) -> bool:
        self.waits -= 1
        return self.waits < 0

    def last_error(self) -> str:
        return "[/core.py:7] MemoryError: no room"


def test_each_engine_that_ends_is_named_and_the_last_one_ends_all() -> None:
    said = list[str]()
    engines: Any = {"a": Ending(5), "b": Ending(2)}
    up.watch(said.append, engines, RUNNING, RUNNING)
    assert said == [
        "engine b has ended, the others go on: [/core.py:7] MemoryError: no room",
        "engine a has ended, there is no other: [/core.py:7] MemoryError: no room",
    ]


def test_the_end_of_the_node_is_said_once() -> None:
    complaints = list[str]()
    node: Any = SimpleNamespace(process=SimpleNamespace(poll=lambda: -9), directory=Path("/kept"))
    engines: Any = {"a": Ending(5)}
    up.watch(complaints.append, engines, RUNNING, node)
    first, second = complaints
    said = "the node has ended with SIGKILL, engines go on without it (log: /kept/node.log)"
    assert (first, second[:12]) == (said, "engine a has")


def test_the_end_of_the_router_ends_all() -> None:
    said = list[str]()
    router: Any = SimpleNamespace(process=SimpleNamespace(poll=lambda: 1), log="why [/it] ended")
    engines: Any = {"a": Ending(1000)}
    up.watch(said.append, engines, router, RUNNING)
    assert said == ["the router has ended with exit status 1: why [/it] ended"]


def test_engines_that_have_started_end_with_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, shown = list[str](), list[str]()
    status = SimpleNamespace(update=shown.append)
    console: Any = SimpleNamespace(status=lambda _: nullcontext(status))

    lines = {"engine-b.log": ""}

    class Server:
        def __init__(self, _config: object, guard: str, _log: Path) -> None:
            self._guard = guard

        def last_line(self) -> str:
            return lines.get(self._guard, f"Loading [/weights] of {self._guard}")

        def await_ready(self, *, waiting: Callable[[], object]) -> None:
            waiting()
            if self._guard == "engine-b.log":
                raise EngineError("b has no memory")

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            stopped.append(self._guard)

    monkeypatch.setattr(up, "VllmServer", Server)
    monkeypatch.setattr(up, "launch", lambda _, log: log.name)
    with pytest.raises(EngineError, match="b has no memory"), ExitStack() as stack:
        up.start_engines(console, stack, ["config"] * 3, tmp_path)  # type: ignore[list-item]
    shown = [Text.from_markup(text).plain for text in shown]
    assert shown == [
        "engine a: Loading [/weights] of engine-a.log",
        "engine b: no output yet",
    ]
    assert sorted(stopped) == ["engine-a.log", "engine-b.log", "engine-c.log"]


def test_no_wait_for_what_starts_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory takes minutes to pin, models to download and to compile; Ctrl-C ends it."""
    limits: list[float | None] = []

    class Started(nullcontext[Any]):
        index = socket = ""

        @classmethod
        def start(cls, *_: object, timeout_s: float, **__: object) -> Self:
            limits.append(timeout_s)
            return cls(SimpleNamespace(await_worker=limits.append))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(up, "NodeProcess", Started)
    monkeypatch.setattr(up, "RouterProcess", Started)
    monkeypatch.setattr(up, "engine_configs", lambda *_: [SimpleNamespace(served_name="m")])
    monkeypatch.setattr(up, "start_engines", lambda *_: {})
    monkeypatch.setattr(up, "_name_commands", lambda *_: None)
    monkeypatch.setattr(up, "watch", lambda *_: None)
    assert up.main(port=0) == 1
    assert limits == [math.inf] * 3

    engine = object.__new__(VllmServer)
    monkeypatch.setattr(engine, "_is_healthy", lambda: True)
    monkeypatch.setattr(engine, "complete", lambda *_, timeout_s, **__: limits.append(timeout_s))
    engine.await_ready()
    assert limits.pop() is None


@pytest.fixture
def directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where `up` makes its directory, of a node that is there and engines that start at once."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(up, "refuse_taken_port", lambda _: None)
    node: Any = nullcontext()
    node.socket = tmp_path / "node.sock"
    monkeypatch.setattr(up, "start_node", lambda *_: node)
    monkeypatch.setattr(up, "engine_configs", lambda *_: [SimpleNamespace(served_name="m")])
    return tmp_path


def test_a_log_that_is_named_is_still_there(
    directories: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_console: object, _stack: object, _configs: object, work: Path) -> None:
        (work / "engine-a.log").touch()
        raise EngineError(f"vLLM ended while starting: why (log: {work / 'engine-a.log'})")

    monkeypatch.setattr(up, "start_engines", fail)
    assert up.main() == 1
    (log,) = directories.glob("kvstore-up-*/engine-a.log")
    said = capsys.readouterr().out
    assert f"(log: {log})" in said
    assert "\n1 engine: starting" in said


@pytest.mark.parametrize("has_ended", [False, True])
def test_ctrl_c_removes_the_logs_unless_one_was_named(directories: Path, has_ended: bool) -> None:
    with pytest.raises(KeyboardInterrupt), up.work_directory(["engine a has"][: int(has_ended)]):
        raise KeyboardInterrupt
    assert bool(list(directories.iterdir())) == has_ended


def test_a_setting_that_the_node_refuses_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NodeFailed(2, "warning a.b text\nkvstore: file 'x' must be PATH:SIZE\n")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(NodeProcess, "start", refuse)
    with pytest.raises(ConfigError, match=r"^file 'x' must be PATH:SIZE$"):
        up.main(port=0, file="x")
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_ready_late_is_waited_for(tmp_path: Path) -> None:
    late = "import time; time.sleep(0.2); print('late ready')"
    process, line = start_ready(
        ["-c", late], log=tmp_path / "log", says="ready", timeout_s=math.inf
    )
    assert line == "late ready\n"
    reap(process)
