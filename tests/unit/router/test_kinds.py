"""Numbers of every kind of engine, from its page of metrics in tests/data/engine_pages.

`vllm.txt` was recorded. The other pages are written by hand from public sources, which the head of
each names: no such engine was run. `ollama` and `openai` (DeepSpeed-FastGen, others) publish no
metrics, so they have no page.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from kvstore.config.router import KINDS
from kvstore.router.engines import probes
from kvstore.router.engines.probes import ENGINES, LINE_BYTES_MAX, PAGE_BYTES_MAX, findings_of
from kvstore.router.engines.workers import STRICT_KINDS
from kvstore.routing.fleet import Fleet
from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.values import LoadSample, WorkerSpec
from tests.kit.routing_check import check_fleet

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
    assert set(KINDS) >= STRICT_KINDS
    assert {kind for kind, row in ENGINES.items() if row.metrics} == set(map(kind_of, PAGES))


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


VLLM = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
ABSURD = ["NaN", "+Inf", "-Inf", "1e13", "-1e300", "1e999", "0x10", "one", "", "١٢e99"]


def page_of(waiting: str, running: str, memory: str) -> bytes:
    values = zip(VLLM, (waiting, running, memory), strict=True)
    return "".join(f'vllm:{name}{{model_name="m"}} {value}\n' for name, value in values).encode()


@pytest.mark.parametrize("value", ABSURD)
@pytest.mark.parametrize("at", range(3))
def test_a_number_that_is_none_is_missing_and_spoils_no_other(value: str, at: int) -> None:
    values = ["4", "5", "0.5"]
    values[at] = value
    found = findings_of(ENGINES["vllm"], page_of(*values))
    its = [found.load.waiting, found.load.running, found.load.memory_used]
    assert its[at] is None
    assert its[:at] + its[at + 1 :] == [4, 5, 0.5][:at] + [4, 5, 0.5][at + 1 :]
    assert found.missing == (f"vllm:{VLLM[at]}",)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (("-1", "-1e12", "-0.5"), (0, 0, 0.0)),
        (("1e12", "0.4", "1e12"), (10**12, 0, 1.0)),
        (("7 1700000000000", "+3", "1"), (7, 3, 1.0)),
    ],
)
def test_numbers_out_of_their_range_are_at_its_end(
    given: tuple[str, str, str], found: tuple[int, int, float]
) -> None:
    load = findings_of(ENGINES["vllm"], page_of(*given)).load
    assert (load.waiting, load.running, load.memory_used) == found


@pytest.mark.parametrize(
    ("block", "blocks", "capacity"),
    [
        ("1e200", "1e200", (0, 0)),
        ("1e12", "1e12", (10**12, 10**24)),
        ("-64", "1000", (0, 0)),
        ("64", "-1000", (64, 0)),
        ("NaN", "1000", (0, 0)),
        ("64", "1000", (64, 64_000)),
    ],
)
def test_capacities_are_numbers_that_the_core_can_hold(
    block: str, blocks: str, capacity: tuple[int, int]
) -> None:
    page = f"sglang:page_size {block}\nsglang:num_pages {blocks}\n".encode()
    found = findings_of(ENGINES["sglang"], page)
    assert (found.block_tokens, found.memory_tokens) == capacity
    fleet, memory_tokens = Fleet(RoutingPolicy()), found.memory_tokens
    fleet.join(WorkerSpec(worker="a", address="h", pool="p", memory_tokens=memory_tokens))
    check_fleet(fleet)


def test_two_models_of_one_engine_are_added_up_and_their_shares_averaged() -> None:
    two = page_of("1", "2", "0.25") + page_of("3", "4", "0.75").replace(b'"m"', b'"n"')
    found = findings_of(ENGINES["vllm"], two)
    assert found.load == LoadSample(waiting=4, running=6, memory_used=0.5)
    assert not found.missing


def test_labels_are_read_whatever_is_in_their_values() -> None:
    names = 'a}b,c{\\"d=\\"1,e\\\\'
    page = f'vllm:lora_requests_info{{x="y",running_lora_adapters="{names}",z="}} 9"}} 2\n'
    found = findings_of(ENGINES["vllm"], page.encode())
    assert found.load.adapters == ("a}b", 'c{\\"d=\\"1', "e\\\\")


@pytest.mark.parametrize("filler", ["a", "a,", 'a="', 'a="\\', "}", "} ", 'a="b" ', " "])
def test_a_hostile_line_holds_nobody_up(filler: str) -> None:
    """A whole page in lines of any length: in quadratic time the test would not end."""
    for length in (100, LINE_BYTES_MAX - 100, PAGE_BYTES_MAX):
        line = b"vllm:num_requests_waiting{%b" % (filler * length)[:length].encode()
        count = PAGE_BYTES_MAX // length
        page = b"\n".join(b'%b",n="%d"} 1' % (line, number) for number in range(count))
        found = findings_of(ENGINES["vllm"], page)
        assert found.load.waiting == (count if length < LINE_BYTES_MAX else None)


def test_long_lines_are_passed_over_and_not_kept() -> None:
    read_line = probes._read_line
    read_line.cache_clear()
    long = b'vllm:num_requests_waiting{a="%b"} 1\n' % (b"x" * LINE_BYTES_MAX)
    found = findings_of(ENGINES["vllm"], long + page_of("4", "5", "0.5"))
    assert found.load.waiting == 4
    assert read_line.cache_info().currsize == 3


@given(st.binary(max_size=300), st.sampled_from(sorted(ENGINES)))
def test_no_page_fails(noise: bytes, kind: str) -> None:
    row = ENGINES[kind]
    lines = [name + noise for name in row.wanted]
    found = findings_of(row, b"\n".join([noise, *lines, *(b"%b 3" % name for name in row.wanted)]))
    assert found.load.memory_used is None or 0 <= found.load.memory_used <= 1
    assert min(found.load.waiting or 0, found.load.running or 0) >= 0
    assert min(found.block_tokens, found.memory_tokens) >= 0
