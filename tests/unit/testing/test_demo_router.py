"""Claims of `kvstore demo --router`, without engines."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from kvstore.demo.engine import Completion, HitCounts
from kvstore.demo.play import DemoError, RouterAct, conclude, show, stays
from kvstore.demo.stage import Replay
from tests.kit.turns_core import RECEIPT


def run(name: str, *, ttft_s: float, places: str, token: int = 1) -> Replay:
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


def concluded(tmp_path: Path, *runs: Replay) -> str:
    out = io.StringIO()
    console = Console(file=out, width=110)
    show(console, runs)
    conclude(console, RouterAct(), runs, tmp_path / "picture.png")
    return out.getvalue()


def test_the_table_the_receipt_and_the_picture(tmp_path: Path) -> None:
    turns = run("round robin", ttft_s=1.0, places="abba")
    routed = run("kvstore router", ttft_s=0.25, places="aabb")
    text = concluded(tmp_path, turns, routed)
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
    turns = run("round robin", ttft_s=1.0, places="abba")
    routed = run("kvstore router", ttft_s=ttft_s, places="aabb", token=token)
    with pytest.raises(DemoError, match=says):
        concluded(tmp_path, turns, routed)
