"""bench-cluster: only a whole run is recorded, a part that fails costs no other, and the simulated
index is right before it is timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import record
from bench.cluster import figures, scale
from bench.scenarios import cluster

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
