"""The demo's verdict: it fails when tokens differ or dram served nothing."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from kvstore.cli.main import cli
from kvstore.demo import play as demo, stage as demo_stage
from kvstore.demo.engine import Completion, HitCounts
from kvstore.demo.flags import PLAN
from kvstore.demo.play import Act, DemoError, PdAct, RestartsAct
from kvstore.demo.stage import Replay, Stage


def answered(ttft_s: float, *tokens: int) -> Completion:
    return Completion(
        tokens=tokens, prompt_tokens=250, cached_tokens=25, ttft_s=ttft_s, duration_s=2.0
    )


def run(
    name: str, dram: int, answer: int = 7, *, later_s: tuple[float, float] = (0.5, 0.7)
) -> Replay:
    """Two users and two rounds."""
    answers = {
        (0, 0): answered(1.0, 1, 2),
        (1, 0): answered(1.2, 4, 5),
        (0, 1): answered(later_s[0], 3, answer),
        (1, 1): answered(later_s[1], 6, 6),
    }
    return Replay(name=name, answers=answers, own_hit_tokens=100, kvstore_hit_tokens=dram)


def verdict(*runs: Replay, act: Act | None = None, picture: Path = Path()) -> str:
    text = io.StringIO()
    (act or RestartsAct()).conclude(Console(file=text, width=200), runs, picture)
    return text.getvalue()


def test_all_is_well() -> None:
    said = verdict(run("alone", 0), run("shared", 450), run("restarted", 800), run("disk", 790))
    assert "spared the engine 50%" in said
    assert "dram served 80% of all prompt tokens" in said
    assert "disk served 79% of all prompt tokens" in said
    assert "First questions then took 1.00 × as long as with vLLM alone" in said


def test_other_tokens_fail_the_demo() -> None:
    with pytest.raises(DemoError, match=r"1 answers of the run 'restarted' differ"):
        verdict(
            run("alone", 0), run("shared", 450), run("restarted", 800, answer=8), run("disk", 1)
        )


@pytest.mark.parametrize("hits", [(0, 800, 800), (450, 0, 800), (450, 800, 0)])
def test_nothing_from_the_node_fails_the_demo(hits: tuple[int, int, int]) -> None:
    names = ("shared", "restarted", "disk")
    with pytest.raises(DemoError, match="served no prompt token"):
        verdict(run("alone", 0), *(run(n, h) for n, h in zip(names, hits, strict=True)))


class EmptyStage(ExitStack):
    """On which nothing runs."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()
        self.progress = nullcontext()
        self.engines, self.nodes = [ENGINE], [NODE]


ENGINE: Any = SimpleNamespace(port=8)
NODE: Any = SimpleNamespace(
    directory=Path("/kept"),
    socket=Path("/kept/node.sock"),
    pid=77,
    supervisor_pid=76,
    metrics_url="http://127.0.0.1:9/metrics",
)


def test_progress_table_and_last_line_show_one_kind_of_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [run(RestartsAct.names[0], 0)]
    for number, hits in enumerate((450, 800, 790), start=2):
        later_s = (0.6 / number, 0.6 / number)
        runs.append(run(RestartsAct.names[number - 1], hits, later_s=later_s))
        runs[-1].saved_s = 4.1
    monkeypatch.setattr(demo, "Stage", EmptyStage)
    monkeypatch.setattr(RestartsAct, "runs", lambda *_: iter(runs))
    finished: list[object] = []
    assert demo.main([], cache=tmp_path, finish=lambda *all_: finished.extend(all_)) == 0
    assert finished == [runs, PLAN]
    text = capsys.readouterr().out
    rows = [
        line.split() for line in text.splitlines() if line.strip().startswith(RestartsAct.names)
    ]
    assert [row[2:6] for row in rows[:2]] == [
        ["600", "690", "1.0", "×"],
        ["300", "300", "2.0", "×"],
    ]
    said = " ".join(text.split("s in all")[-1].split())
    assert said.startswith(
        "Speed-up of the first token from round 2 on: with kvstore 2.0 ×, engine restarted 3.0 ×,"
        " node restarted 4.0 ×; 12 s of prefill saved. Next: "
    )
    assert "kvstore up (to ask it yourself), demo --cluster, --pd, --router" in said


def test_prefill_and_decode_are_compared_and_drawn(tmp_path: Path) -> None:
    alone, split = run("one engine", 0), run("prefill → decode", 600, later_s=(0.6, 0.9))
    alone.token_s, split.token_s = (0.0, 0.1, 0.9), (0.0, 0.1, 0.3)
    with pytest.raises(DemoError, match="No block was pushed"):
        verdict(alone, split, act=PdAct())
    split.moved = 1700
    said = verdict(alone, split, act=PdAct(), picture=tmp_path / "new" / "pd.png")
    assert "1,700 blocks were pushed" in said
    assert "from round 2 on: 1.25 × that of one engine (median)" in said
    assert "are computed: 200 ms, on one engine 800 ms" in said
    assert PdAct().gain([alone, split]).endswith("0.25 × that of one engine")
    assert (tmp_path / "new" / "pd.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--users=0", "--users '0' must be a number of at least 1: see 'kvstore demo --help'\n"),
        ("--users=many", "--users 'many' must be a number of at least 1"),
        ("--rounds=1", "--rounds '1' must be at least 2"),
    ],
)
def test_a_wrong_count_is_one_sentence(
    flag: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        demo.main([flag])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["demo", "up"])
def test_without_an_engine_the_demo_says_what_is_missing(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvstore.cli.main.DEMO_NEEDS", ("vllm_that_is_not_there",))
    with pytest.raises(SystemExit) as stopped:
        cli([command], standalone_mode=False)
    assert stopped.value.code == 2
    assert "this Python has no vllm_that_is_not_there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "usage", "example"),
    [
        ("demo", "usage: kvstore demo [-h]", "kvstore demo --cluster"),
        ("up", "usage: kvstore up [-h] [options] [MODEL]", "kvstore up Qwen/Qwen3-8B"),
    ],
)
def test_help_needs_nothing_that_the_demo_runs(
    name: str, usage: str, example: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.cli.main.DEMO_NEEDS", ("vllm_that_is_not_there",))
    run: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _, command: run.append(command))
    cli([name, "--help"], standalone_mode=False)
    (command,) = run
    code = (
        "import runpy, sys; sys.modules.update(dict.fromkeys(('psutil', 'vllm', 'torch', 'rich')));"
        f"sys.argv = {command[3:]}; runpy.run_module(sys.argv[0], run_name='__main__')"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.startswith(usage)
    assert example in told.stdout


def test_without_a_terminal_each_phase_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_stage, "build_model", lambda _: None)
    monkeypatch.setattr(demo_stage, "encoder", lambda _: lambda text: list(text.encode()))
    counts = iter([HitCounts(5, 7, 1.0), HitCounts(105, 457, 2.5)])
    prompts: list[tuple[int, ...]] = []

    def complete(prompt: tuple[int, ...], *, max_tokens: int) -> Completion:
        prompts.append(prompt)
        return answered(0.6, *range(max_tokens))

    engine: Any = SimpleNamespace(complete=complete, hits=lambda: next(counts))
    text = io.StringIO()
    console = Console(file=text, width=96)
    with Stage(console, PLAN, ["alone", "shared"], cache=tmp_path) as stage, stage.progress:
        stage.note(0, "vLLM is starting")
        replayed = stage.replay(0, engine)
        stage.note(1, "vLLM is starting")
    assert text.getvalue().splitlines() == [
        "building the model (once)",
        "alone: vLLM is starting",
        "alone: median 600 ms to first token from round 2 on",
        "shared: vLLM is starting",
    ]
    assert not stage.work.exists()
    assert len(replayed.answers) == len(prompts) == PLAN.users * PLAN.rounds
    assert (replayed.own_hit_tokens, replayed.kvstore_hit_tokens) == (100, 450)
    assert replayed.saved_s == 1.5
