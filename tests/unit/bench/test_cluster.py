"""bench-cluster: only a whole run is recorded, a part that fails costs no other, and the simulated
index is right before it is timed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest

from bench import record
from bench.cluster import congestion, figures, index, scale
from bench.scenarios import cluster
from kvstore.ports import End
from kvstore.types import KEY_BYTES

FIGURES = {"figures": {"x_over_y": figures.at_least(0.9, 1.0, interval_95=[0.9, 1.1])}}


def _broken() -> dict[str, Any]:
    raise AssertionError("the node hung up")


def _surprised() -> dict[str, Any]:
    raise KeyError("peer_blocks_per_s")


def _absent() -> dict[str, Any]:
    raise figures.NotMeasured("there is no tc")


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, cluster.Part]:
    found: dict[str, cluster.Part] = {
        "index": _absent,
        "index_grpc": _surprised,
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
    assert "KeyError" in written["index_grpc"]["not_measured"]
    assert written["fetch"]["figures"] == written["congestion"]["figures"] == FIGURES["figures"]
    assert written["environment"]["cores"]
    kept = json.loads((record.ROOT / "build" / "cluster.json").read_text())
    assert kept == {name: written[name] for name in cluster.FULL}


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


def test_one_part_can_be_measured_again(parts: dict[str, cluster.Part]) -> None:
    cluster.main([])
    before = json.loads((record.RESULTS / "cluster.json").read_text())
    parts["ttft"] = lambda: FIGURES
    assert cluster.main(["--again", "ttft"]) == 0
    after = json.loads((record.RESULTS / "cluster.json").read_text())
    again = after.pop("ttft")
    assert again["figures"] == FIGURES["figures"]
    assert again["measured_later"].keys() == before["environment"].keys()
    assert "not_measured" in before.pop("ttft")
    assert after == before


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
        index.measure(entries=1, matches=1)


def _small(monkeypatch: pytest.MonkeyPatch, *, fails_at: int = 0) -> list[tuple[int, int, bool]]:
    """What is asked of processes, which do a little of it here."""
    asked: list[tuple[int, int, bool]] = []

    def run(entries: int, nodes: int, *, churns: bool) -> dict[str, Any]:
        asked.append((entries, nodes, churns))
        if entries == fails_at:
            raise subprocess.CalledProcessError(-9, "python")
        return scale.one_size(20_000, 4, churns=churns)

    monkeypatch.setattr(scale, "in_fresh_process", run)
    return asked


def test_an_index_too_large_for_this_machine_is_scaled_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = _small(monkeypatch)
    monkeypatch.setattr(scale, "fits", lambda entries: entries < 10**9)
    found = scale.measure(entries=10**9, nodes=400)
    assert asked == [(10**7, 4, False), (10**8, 40, True)]
    assert found["detail"]["scaled_down"]
    assert found["figures"]["wrong_answers_after_churn"]["met"]


def test_an_index_that_fails_costs_no_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _small(monkeypatch, fails_at=10**7)
    monkeypatch.setattr(scale, "fits", lambda _: True)
    found = scale.measure(entries=10**7, nodes=100)
    assert asked[-2:] == [(10**7, 100, True), (10**6, 10, True)]
    assert "10,000,000 entries failed" in found["detail"]["failed"]
    assert len(found["detail"]["sizes"]) == 2


def test_reads_that_fail_beside_a_flow_are_no_pacing() -> None:
    class Party:
        def read(self, *_: object) -> None:
            pass

        def ends(self, _: int) -> dict[int, End]:
            return {1: End.FAILED}

    class Flow:
        def carry_s(self, _: int) -> float:
            return 1.0

    reader = object.__new__(congestion.Reader)
    vars(reader).update(_reader=Party(), _whole=None, reads_beside=0)
    with pytest.raises(AssertionError, match="FAILED"):
        reader.beside_s(cast("congestion.Flow", Flow()), 1)


def test_what_is_dropped_is_gone_and_what_several_nodes_share_is_one() -> None:
    simulated = scale.Cluster(entries=2 * scale.SHARED_BY * 10 * scale.CHAIN, nodes=20)
    simulated.fill()
    shared, own = simulated.keys(3, 0), simulated.keys(3, 1)
    assert simulated.ask(shared)[1] == {f"n{node}": scale.CHAIN for node in range(10)}
    assert simulated.ask(own)[1] == {"n3": scale.CHAIN}
    simulated.tell(3, *simulated.renew(3, 1))
    assert simulated.ask(own)[1] == {}
    assert simulated.ask(simulated.keys(3, 1)[: 7 * KEY_BYTES])[1] == {"n3": 7}
