"""Numbers of every kind of engine, from its page of metrics in tests/data/engine_pages.

`vllm.txt` was recorded. The other pages are written by hand from public sources, which the head of
each names: no such engine was run. `ollama` and `openai` (DeepSpeed-FastGen, others) publish no
metrics, so they have no page.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.config.router import KINDS
from kvstore.router.engines.kinds import ENGINES, findings_of
from kvstore.routing.values import LoadSample

FOLDER = Path(__file__).parents[2] / "data" / "engine_pages"
PAGES = {path.stem: path.read_bytes() for path in sorted(FOLDER.glob("*.txt"))}
NO_SHARE = {"tgi", "llamacpp"}
"""Kinds that publish no share of the KV cache in use."""
CAPACITY = {"sglang": (64, 64_000), "trtllm": (32, 64_000), "triton": (64, 64_000)}
"""Tokens of a block and of the cache."""
TWO_RANKS = b"""vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="0",num_gpu_blocks="40"} 1.0
vllm:lora_requests_info{max_lora="4",running_lora_adapters="old",waiting_lora_adapters=""} 1.5e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="x, y",waiting_lora_adapters=""} 1.6e+09
"""


def kind_of(page: str) -> str:
    return page.partition("-")[0]


@pytest.mark.parametrize("page", PAGES.keys() - {"vllm"})
def test_numbers_are_found(page: str) -> None:
    kind = kind_of(page)
    found = findings_of(ENGINES[kind], PAGES[page])
    share = None if page in NO_SHARE else 0.375
    assert found.load == LoadSample(waiting=4, running=5, memory_used=share)
    assert (found.block_tokens, found.memory_tokens) == CAPACITY.get(kind, (0, 0))
    assert found.missing == ()


def test_numbers_of_a_recorded_vllm_are_found() -> None:
    found = findings_of(ENGINES["vllm"], PAGES["vllm"])
    assert found.load == LoadSample(
        waiting=3, running=2, memory_used=0.009770395701025891, adapters=("one",)
    )
    assert (found.block_tokens, found.memory_tokens, found.missing) == (128, 262_144, ())


def test_several_ranks_are_added_up_and_the_newest_adapters_count() -> None:
    found = findings_of(ENGINES["vllm"], TWO_RANKS)
    assert found.load == LoadSample(waiting=4, running=5, memory_used=0.375, adapters=("x", "y"))
    assert (found.block_tokens, found.memory_tokens, found.missing) == (128, 5120, ())


@pytest.mark.parametrize("page", PAGES)
def test_a_renamed_metric_is_missing_and_not_0(page: str) -> None:
    kind, text = ENGINES[kind_of(page)], PAGES[page]
    assert kind.load
    for figure in kind.load:
        old, new = figure.metric, figure.metric + "_v2"
        if figure.label:  # of several figures of one metric, one goes
            old, new = f'{figure.label}="{figure.value}"', f'{figure.label}="new"'
        renamed = text.replace(old.encode(), new.encode())
        found = findings_of(kind, renamed)
        assert found.missing == (figure.metric,)
        values = [found.load.waiting, found.load.running, found.load.memory_used]
        is_known = (kind.waiting, kind.running, kind.memory).index(figure)
        assert values[is_known] is None


def test_every_kind_of_the_flag_has_a_row_and_every_row_with_metrics_a_page() -> None:
    assert set(KINDS) == ENGINES.keys()
    assert {kind for kind, row in ENGINES.items() if row.metrics} == set(map(kind_of, PAGES))


def test_the_head_of_a_page_names_its_source() -> None:
    for page, text in PAGES.items():
        head = text.partition(b"\n")[0]
        assert head.startswith(b"# Recorded " if page == "vllm" else b"# Written by hand")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\x00" * 100,
        "vllm:num_requests_waiting NaN\nvllm:num_requests_running +Inf\n",
        "vllm:num_requests_waiting{" + 'a="' * 1000,
        "vllm:num_requests_waiting one\n",
        'vllm:cache_config_info{block_size="-1",num_gpu_blocks="9999999999999"} 1\n',
    ],
)
def test_pages_of_nonsense_say_nothing(text: str) -> None:
    found = findings_of(ENGINES["vllm"], text.encode())
    assert (found.load, found.block_tokens, found.memory_tokens) == (LoadSample(), 0, 0)
    assert len(found.missing) == 3
