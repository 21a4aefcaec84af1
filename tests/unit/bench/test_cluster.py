"""bench-cluster: only a whole run is recorded, a part that fails costs no other, and the simulated
index is right before it is timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import record
from bench.cluster import figures, index, picture, scale
from bench.scenarios import cluster
from kvstore.types import KEY_BYTES

FIGURES = {"figures": {"x_over_y": figures.at_least(0.9, 1.0, interval_95=[0.9, 1.1])}}


def _broken() -> dict[str, Any]:
    raise AssertionError("the node hung up")


def _absent() -> dict[str, Any]:
    raise figures.NotMeasured("there is no tc")


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, cluster.Part]:
    found: dict[str, cluster.Part] = {
        "index": _absent,
        "fetch": lambda: FIGURES,
        "ttft": _broken,
        "congestion": lambda: FIGURES,
        "scale": _absent,
    }
    monkeypatch.setattr(cluster, "FULL", found)
    monkeypatch.setattr(cluster, "QUICK", found)
    monkeypatch.setattr(record, "RESULTS", tmp_path / "bench" / "results")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    return found


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "ASKED_PER_MINUTE", 60)
    monkeypatch.setattr(scale, "MATCHES", 20)


@pytest.mark.usefixtures("parts")
def test_a_whole_run_records_what_it_found_and_why_it_did_not() -> None:
    assert cluster.main([]) == 0
    written = json.loads((record.RESULTS / "cluster.json").read_text())
    assert written["index"] == {"not_measured": "there is no tc"}
    assert "the node hung up" in written["ttft"]["not_measured"]
    assert written["fetch"]["figures"] == written["congestion"]["figures"] == FIGURES["figures"]
    assert written["environment"]["cores"]


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("flags", [["--quick"], ["--only", "fetch"], ["--quick", "--only", "ttft"]])
def test_a_part_or_a_try_is_printed_and_not_recorded(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cluster.main(flags) == 0
    out = capsys.readouterr().out
    printed = json.loads(out[out.index("\n{\n") :])
    assert list(printed) == (flags[-1:] if "--only" in flags else list(cluster.FULL))
    assert not record.RESULTS.exists()


def test_figures_are_held_against_their_goals() -> None:
    assert figures.at_least(0.9, 0.9)["met"]
    assert not figures.at_least(0.9, 0.89)["met"]
    assert figures.at_most(1.6, 1.6)["met"]
    assert not figures.at_most(1.6, 1.61)["met"]


def test_a_ratio_is_of_medians_and_its_interval_of_pairs() -> None:
    value, (low, high) = figures.ratio([2.0, 4.0, 60.0], [1.0, 2.0, 30.0])
    assert value == low == high == 2.0


def test_without_dynamo_the_index_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "PYTHON", tmp_path / ".venv-dynamo" / "bin" / "python")
    with pytest.raises(figures.NotMeasured, match="venv-dynamo"):
        index.measure(entries=1, matches=1, rounds=1)


def test_an_index_too_large_for_this_machine_is_scaled_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = []

    def run(entries: int, nodes: int, *, churns: bool) -> dict[str, Any]:
        sizes.append((entries, churns))
        return scale.one_size(20_000, nodes, churns=churns)

    monkeypatch.setattr(scale, "_fits", lambda entries: entries < 10**9)
    monkeypatch.setattr(scale, "_in_fresh_process", run)
    found = scale.measure(entries=10**9, nodes=4)
    assert sizes == [(10**7, False), (10**8, True)]
    assert found["detail"]["scaled_down_for_memory"]
    assert found["figures"]["wrong_answers_after_churn"]["met"]


def test_what_is_dropped_is_gone_and_what_several_nodes_share_is_one() -> None:
    simulated = scale.Cluster(entries=2 * scale.SHARED_BY * 10 * scale.CHAIN, nodes=20)
    simulated.fill()
    shared, own = simulated.keys(3, 0), simulated.keys(3, 1)
    assert simulated.ask(shared)[1] == {f"n{node}": scale.CHAIN for node in range(10)}
    assert simulated.ask(own)[1] == {"n3": scale.CHAIN}
    simulated.tell(3, *simulated.renew(3, 1))
    assert simulated.ask(own)[1] == {}
    assert simulated.ask(simulated.keys(3, 1)[: 7 * KEY_BYTES])[1] == {"n3": 7}


def test_the_plot_is_made_of_what_was_found(tmp_path: Path) -> None:
    sizes = [scale.one_size(count, 4, churns=True) for count in (20_000, 40_000)]
    for size in sizes:  # in a process that has grown before, it may be none
        size["resident_bytes"] = max(size["resident_bytes"], size["entries"] * scale.GOAL_BYTES)
    path = picture.draw({"scale": {"detail": {"sizes": sizes}}}, tmp_path / "x.png")
    assert path.stat().st_size > 10_000
