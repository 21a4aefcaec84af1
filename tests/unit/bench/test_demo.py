"""The demo's verdict: it fails when tokens differ or dram served nothing."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bench.scenarios import demo


def run(name: str, dram: int, answer: int = 7) -> demo.Run:
    return demo.Run(
        name=name,
        ttft_s=[[1.0, 1.2], [0.5, 0.7]],
        tokens={"0/0": (1, 2), "0/1": (3, answer)},
        prompt_tokens=1000,
        own_hit_tokens=100,
        kvstore_hit_tokens=dram,
        wall_s=9.0,
        engine_start_s=3.0,
    )


def verdict(*runs: demo.Run) -> str:
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
