"""The demo's verdict: it fails when tokens differ or dram served nothing."""

from __future__ import annotations

import io
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import msgspec
import pytest
from rich.console import Console

from kvstore.cli.main import cli
from kvstore.demo import play as demo, stage as demo_stage
from kvstore.demo.engine import Completion, HitCounts
from kvstore.demo.play import Act, DemoError, PdAct, RestartsAct, RouterAct, conclude, show, stays
from kvstore.demo.stage import Replay, Stage
from kvstore.demo.workload import ConversationPlan
from tests.kit.turns_core import RECEIPT

PLAN = ConversationPlan()
NAMES = ("vLLM alone", "with kvstore", "engine restarted", "node restarted")


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
    return Replay(name=name, answers=answers, hits=HitCounts(100, dram, 4.1 * bool(dram)))


def verdict(*runs: Replay, act: Act | None = None, picture: Path = Path()) -> str:
    text = io.StringIO()
    demo.conclude(Console(file=text, width=300), act or RestartsAct(), runs, picture)
    return text.getvalue()


def test_all_is_well(tmp_path: Path) -> None:
    runs = run("alone", 0), run("shared", 450), run("restarted", 800), run("disk", 790)
    said = verdict(*runs, picture=tmp_path / "demo.png")
    assert (tmp_path / "demo.png").stat().st_size > 1000
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


def test_table_and_last_line_show_one_kind_of_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [run(NAMES[0], 0)]
    for number, hits in enumerate((450, 800, 790), start=2):
        later_s = (0.6 / number, 0.6 / number)
        runs.append(run(NAMES[number - 1], hits, later_s=later_s))
    monkeypatch.setattr(demo, "Stage", EmptyStage)
    monkeypatch.setattr(RestartsAct, "runs", lambda *_: iter(runs))
    finished: list[object] = []
    finish = lambda *all_: finished.extend(all_)  # noqa: E731
    assert demo.main(cache=tmp_path, finish=finish, users=2, seed=None) == 0
    assert finished == [runs, ConversationPlan(users=2)]
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines() if line.strip().startswith(NAMES)]
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
        ("--users=0", "'--users': 0 is not in the range x>=1"),
        ("--users=many", "'--users': 'many' is not a valid whole number"),
        ("--rounds=1", "'--rounds': 1 is not in the range x>=2"),
        ("--pd", "--pd and --router are two demos: give one of them"),
    ],
)
def test_a_wrong_flag_is_refused(flag: str, said: str) -> None:
    with pytest.raises(click.UsageError) as refused:
        cli(["demo", "--router", flag], standalone_mode=False)
    assert said in refused.value.format_message()


def test_flags_are_those_of_the_act(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr("kvstore.cli.main.DEMO_NEEDS", ())

    def main(**flags: object) -> int:
        given.append(flags)
        return 3

    monkeypatch.setattr(demo, "main", main)
    with pytest.raises(SystemExit) as stopped:
        cli(["demo", "--pd", "--users", "2", "--plot", "pd.png"], standalone_mode=False)
    assert stopped.value.code == 3
    assert given == [
        {"act": "pd", "users": 2, "rounds": None, "seed": None, "plot": Path("pd.png")}
    ]


@pytest.mark.parametrize("command", ["demo", "up"])
def test_without_an_engine_the_demo_says_what_is_missing(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvstore.cli.main.DEMO_NEEDS", ("vllm_that_is_not_there",))
    with pytest.raises(SystemExit) as stopped:
        cli([command], standalone_mode=False)
    assert stopped.value.code == 2
    assert "this Python has no vllm_that_is_not_there" in capsys.readouterr().err


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
    with Stage(console, PLAN, cache=tmp_path) as stage:
        stage.note("alone: vLLM is starting")
        replayed = stage.replay("alone", engine)
        stage.note("shared: vLLM is starting")
    assert text.getvalue().splitlines() == [
        "building the model (once)",
        "alone: vLLM is starting",
        "alone: median 600 ms to first token from round 2 on",
        "shared: vLLM is starting",
    ]
    assert not stage.work.exists()
    assert len(replayed.answers) == len(prompts) == PLAN.users * PLAN.rounds
    assert replayed.hits == (100, 450, 1.5)


# ── kvstore demo --router ─────────────────────────────────────────────────────────────────────────


def answered_at(name: str, *, ttft_s: float, places: str, token: int = 1) -> Replay:
    """Two users and two rounds; `places`: workers of user 0 in both rounds, then of user 1."""
    answers, receipts = {}, []
    for number, place in enumerate(places):
        key = divmod(number, 2)
        answers[key] = Completion(
            id=f"cmpl-r{number}",
            tokens=(token,),
            prompt_tokens=100,
            cached_tokens=40,
            ttft_s=ttft_s * (1 + key[1]),
            duration_s=1.0,
        )
        receipts.append(msgspec.structs.replace(RECEIPT, request_id=f"r{number}", chosen=place))
    return Replay(name=name, answers=answers, hits=HitCounts(160, 0, 0), receipts=receipts)


def shown(tmp_path: Path, *runs: Replay) -> str:
    out = io.StringIO()
    console = Console(file=out, width=110)
    show(console, runs)
    conclude(console, RouterAct(), runs, tmp_path / "picture.png")
    return out.getvalue()


def test_the_table_the_receipt_and_the_picture(tmp_path: Path) -> None:
    turns = answered_at("round robin", ttft_s=1.0, places="abba")
    routed = answered_at("kvstore router", ttft_s=0.25, places="aabb")
    text = shown(tmp_path, turns, routed)
    assert "0.25 × that of round robin" in text
    assert "request r3: b" in text
    [line] = [line for line in text.splitlines() if line.strip().startswith("kvstore router")]
    assert line.split()[2:] == ["500", "500", "4.0", "×", "160", "0", "240", "4/4"]
    assert "with a history 2 went to the engine of the turn before, by round robin 0." in text
    assert (stays(turns), stays(routed)) == ((0, 2), (2, 2))
    assert (tmp_path / "picture.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("ttft_s", "token", "says"), [(2.0, 1, "2.00 × round robin's"), (0.5, 2, "4 answers")]
)
def test_a_claim_that_fails_is_one_sentence(
    tmp_path: Path, ttft_s: float, token: int, says: str
) -> None:
    turns = answered_at("round robin", ttft_s=1.0, places="abba")
    routed = answered_at("kvstore router", ttft_s=ttft_s, places="aabb", token=token)
    with pytest.raises(DemoError, match=says):
        shown(tmp_path, turns, routed)
