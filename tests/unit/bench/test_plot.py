"""The pictures of bench/results: made from the records as they stand, and legible."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from bench import plot

Change = Callable[[dict[str, Any]], object]


def read(name: str) -> Any:
    return json.loads((plot.RESULTS / f"{name}.json").read_bytes())


def message(figure: Any) -> Any:
    return figure.texts[0].get_text()


@pytest.fixture(autouse=True)
def closed() -> Any:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    yield
    pyplot.close("all")


@pytest.mark.parametrize("name", plot.PICTURES)
def test_a_picture_is_as_new_as_its_record(name: str) -> None:
    of = hashlib.sha256((plot.RESULTS / f"{name}.json").read_bytes()).hexdigest()
    drawn = (plot.RESULTS / f"{name}.png").read_bytes()
    assert of.encode() in drawn, f"older than its record: `python bench/plot.py {name}`"


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("demo", lambda r: r["runs"][2]["ttft_ms_rounds_2_on"].update(p50=770.0), "0.77 s with"),
        ("single", lambda r: r["hits"].update(dram_hit_over_own_hit=1.5), "1.50 × a prefix-cache"),
        ("peers", lambda r: r["files"]["kvstore_over_lmcache"].update(ratio=1.4), "take 1.40 ×"),
        ("cluster", lambda r: r["ttft"]["detail"]["samples_ms"].update(fetched=[99e3]), "99.00 s"),
        ("pd", lambda r: _beside(r).update(value=0.4), "takes 0.40 ×"),
        ("policies", lambda r: _reuse(r).update(miss_blocks=1.0), "at worst 9 % more"),
        ("soak", lambda r: r.update(violations=3), "3 violations"),
    ],
)
def test_the_message_is_of_the_record(name: str, change: Change, told: str) -> None:
    record = read(name)
    assert told not in message(plot.PICTURES[name](record))
    change(record)
    assert told in message(plot.PICTURES[name](record))


def _beside(record: dict[str, Any]) -> Any:
    return record["decode"]["figures"]["time_per_output_token_over_one_engine"]


def _reuse(record: dict[str, Any]) -> Any:
    return record["workloads"]["trace"]["sizes"][0]["reuse"]


@pytest.mark.parametrize("name", plot.PICTURES)
def test_every_label_is_inside_the_picture_and_covers_no_other(name: str) -> None:
    figure = plot.PICTURES[name](read(name))
    figure.canvas.draw()
    axes = figure.axes
    assert all(_inside(figure.bbox, part.get_tightbbox()) for part in axes)
    labels = [*figure.texts, *(part.xaxis.label for part in axes)]
    labels += [
        label for part in axes for label in part.get_children() if hasattr(label, "get_text")
    ]
    boxes = {label.get_text(): label.get_window_extent() for label in labels if label.get_text()}
    assert [text for text, box in boxes.items() if not _inside(figure.bbox, box)] == []
    pairs = itertools.combinations(boxes.items(), 2)
    assert [(a, b) for (a, one), (b, other) in pairs if one.overlaps(other)] == []


def _inside(outer: Any, inner: Any) -> bool:
    return bool(outer.x0 <= inner.x0 and inner.x1 <= outer.x1 and outer.y0 <= inner.y0 < outer.y1)
