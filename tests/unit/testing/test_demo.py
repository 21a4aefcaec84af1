"""The demo's verdict: it fails when tokens differ or dram served nothing."""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from kvstore.cli.main import cli
from kvstore.demo import cluster as demo_cluster, play as demo
from kvstore.demo.flags import PLAN


def run(name: str, dram: int, answer: int = 7) -> demo.ReplayRun:
    return demo.ReplayRun(
        name=name,
        plan=PLAN,
        ttft_s=[[1.0, 1.2], [0.5, 0.7]],
        tokens={"0/0": (1, 2), "0/1": (3, answer)},
        prompt_tokens=1000,
        own_hit_tokens=100,
        kvstore_hit_tokens=dram,
        wall_s=9.0,
        engine_start_s=3.0,
    )


def verdict(*runs: demo.ReplayRun) -> str:
    text = io.StringIO()
    demo.conclude(Console(file=text, width=200), runs)
    return text.getvalue()


def test_all_is_well() -> None:
    said = verdict(run("alone", 0), run("shared", 450), run("restarted", 800), run("disk", 790))
    assert "spared the engine 50%" in said
    assert "dram served 80% of all prompt tokens" in said
    assert "disk served 79% of all prompt tokens" in said


def test_other_tokens_fail_the_demo() -> None:
    with pytest.raises(demo.DemoError, match=r"1 answers of the run 'restarted' differ"):
        verdict(
            run("alone", 0), run("shared", 450), run("restarted", 800, answer=8), run("disk", 1)
        )


@pytest.mark.parametrize("hits", [(0, 800, 800), (450, 0, 800), (450, 800, 0)])
def test_nothing_from_the_node_fails_the_demo(hits: tuple[int, int, int]) -> None:
    names = ("shared", "restarted", "disk")
    with pytest.raises(demo.DemoError, match="served no prompt token"):
        verdict(run("alone", 0), *(run(n, h) for n, h in zip(names, hits, strict=True)))


def cluster_verdict(fetched: float, *runs: demo.ReplayRun) -> str:
    text = io.StringIO()
    demo_cluster.conclude(Console(file=text, width=200), runs, fetched)
    return text.getvalue()


def test_two_nodes_are_well() -> None:
    said = cluster_verdict(700.0, run("alone", 0), run("a", 100), run("b", 800))
    assert "700 of 1,000 prompt tokens came to node b" in said


def test_two_nodes_of_which_none_serves_the_other_fail_the_demo() -> None:
    with pytest.raises(demo.DemoError, match="No prompt token came from the other node"):
        cluster_verdict(0.0, run("alone", 0), run("a", 100), run("b", 800))
    with pytest.raises(demo.DemoError, match=r"1 answers of the run 'b' differ"):
        cluster_verdict(700.0, run("alone", 0), run("a", 100), run("b", 800, answer=8))


def kept(directory: Path) -> demo.KeptRunning:
    node = SimpleNamespace(
        directory=directory,
        socket=directory / "node.sock",
        pid=77,
        supervisor_pid=76,
        metrics_url="http://127.0.0.1:9/metrics",
    )
    return demo.KeptRunning(cast("Any", SimpleNamespace(port=8)), cast("Any", node), (1, 2, 3))


def test_what_is_kept_can_be_tried_until_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: threading.Event) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Event, "wait", interrupted)
    text = io.StringIO()
    demo.hold(Console(file=text, width=80), kept(tmp_path))
    said = text.getvalue()
    assert f"@{tmp_path}/request.json" in said, "not folded: it is to be copied"
    assert (tmp_path / "request.json").read_text().count("[1,2,3]") == 1
    assert said.endswith("stopping engine and node\n")


def test_the_commands_to_try_are_those_of_the_program(tmp_path: Path) -> None:
    mine = [
        shlex.split(command)[1:]
        for _, command in demo.commands_to_try(kept(tmp_path), tmp_path / "r.json")
        if "kvstore " in command and not command.startswith("curl")
    ]
    assert {words[0] for words in mine} <= set(cli.commands)
    for words in mine:
        cli.commands[words[0]].make_context(words[0], words[1:]).close()
    assert len(mine) >= 3


@pytest.mark.parametrize("wrong", ["0", "-1", "many"])
def test_a_wrong_count_is_one_sentence(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        demo.main([f"--users={wrong}"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == (
        f"kvstore: --users '{wrong}' must be a number of at least 1: see 'kvstore demo --help'\n"
    )


def test_without_an_engine_the_demo_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvstore.cli.main.DEMO_NEEDS", ("vllm_that_is_not_there",))
    with pytest.raises(SystemExit) as stopped:
        cli(["demo"], standalone_mode=False)
    assert stopped.value.code == 2
    assert "this Python has no vllm_that_is_not_there" in capsys.readouterr().err


def test_help_needs_nothing_that_the_demo_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.cli.main.DEMO_NEEDS", ("vllm_that_is_not_there",))
    run: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _, command: run.append(command))
    cli(["demo", "--help"], standalone_mode=False)
    (command,) = run
    code = (
        "import runpy, sys; sys.modules.update(dict.fromkeys(('psutil', 'vllm', 'torch', 'rich')));"
        f"sys.argv = {command[3:]}; runpy.run_module(sys.argv[0], run_name='__main__')"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.startswith("usage: kvstore demo [-h]")
    assert "kvstore demo --keep" in told.stdout


def test_help_has_examples_that_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main(["--help"])
    _, _, examples = capsys.readouterr().out.partition("examples:\n")
    commands = [shlex.split(line) for line in examples.splitlines() if line]
    assert [command[:2] for command in commands] == [["kvstore", "demo"]] * 6


def test_without_a_terminal_each_phase_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "build_model", lambda *_, **__: None)
    monkeypatch.setattr(demo, "encoder", lambda _: None)
    monkeypatch.setattr(demo, "Conversations", lambda *_: None)
    monkeypatch.setattr(demo, "replay", lambda *_: run("alone", 0))
    text = io.StringIO()
    stage = demo.DemoStage(Console(file=text, width=96), PLAN, ["alone", "shared"], cache=tmp_path)
    with stage.progress:
        stage.note(0, "vLLM is starting")
        stage.replay(0, cast("Any", None))
        stage.note(1, "vLLM is starting")
    assert text.getvalue().splitlines() == [
        "building the model (once)",
        "alone: vLLM is starting",
        "alone: median 850 ms to first token",
        "shared: vLLM is starting",
    ]
