"""Numbers of every kind of engine, from pages of metrics.

No page was recorded from an engine. They are written here by hand, with names and labels from these
sources; only vLLM was run beside the router (tests/integration/engine/test_router.py):

    vllm      vllm/v1/metrics/loggers.py of vLLM 0.32.0; two ranks, two sets of adapters
    sglang    docs/references/production_metrics.md of sgl-project/sglang at 00b08c4;
              cache_config_info: from the list of model servers' metrics of llm-d's router 0.10.0.
              SGLang 0.5.11 and later are said to publish gauges in its place
    tgi       docs/source/reference/metrics.md of huggingface/text-generation-inference at 53fdbe6
    trtllm    default engines of the Gateway API inference extension's endpoint picker
    triton    README of triton-inference-server/tensorrtllm_backend (Triton 23.11); `waiting` and
              `fraction`: as the Gateway API inference extension reads them
    llamacpp  tools/server/README.md of ggml-org/llama.cpp at 00dc805, which has no share of the KV
              cache; builds of 2024 published kv_cache_usage_ratio
    ollama    publishes no metrics, so there is no page
"""

from __future__ import annotations

import pytest

from kvstore.config.router import KINDS
from kvstore.router.engines.kinds import ENGINES, findings_of
from kvstore.routing.values import LoadSample

PAGES = {
    "vllm": """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="0",num_gpu_blocks="40"} 1.0
vllm:lora_requests_info{max_lora="4",running_lora_adapters="old",waiting_lora_adapters=""} 1.5e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="x, y",waiting_lora_adapters=""} 1.6e+09
""",
    "sglang": """sglang:num_running_reqs{model_name="m"} 5.0
sglang:num_queue_reqs{model_name="m"} 4.0
sglang:token_usage{model_name="m"} 0.375
sglang:cache_config_info{num_pages="1000",page_size="64"} 1.0
""",
    "tgi": "tgi_batch_current_size 5\ntgi_queue_size 4\n",
    "trtllm": """trtllm_num_requests_waiting{engine_type="trt",model_name="m"} 4.0
trtllm_num_requests_running{engine_type="trt",model_name="m"} 5.0
trtllm_kv_cache_utilization{engine_type="trt",model_name="m"} 0.375
""",
    "triton": """nv_trt_llm_request_metrics{model="m",request_type="waiting",version="1"} 4
nv_trt_llm_request_metrics{model="m",request_type="scheduled",version="1"} 5
nv_trt_llm_request_metrics{model="m",request_type="max",version="1"} 512
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="m",version="1"} 0.375
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="m",version="1"} 6239
""",
    "llamacpp": """llamacpp:requests_processing 5
llamacpp:requests_deferred 4
llamacpp:n_busy_slots_per_decode 2.5
""",
}
COUNTS_ONLY = {"tgi", "llamacpp"}


@pytest.mark.parametrize("kind", PAGES)
def test_numbers_are_found(kind: str) -> None:
    load, block_tokens, memory_tokens = findings_of(ENGINES[kind], PAGES[kind])
    adapters = ("x", "y") if kind == "vllm" else None
    memory = None if kind in COUNTS_ONLY else 0.375
    assert load == LoadSample(waiting=4, running=5, memory_used=memory, adapters=adapters)
    assert (block_tokens, memory_tokens) == {"vllm": (128, 5120), "sglang": (64, 64000)}.get(
        kind, (0, 0)
    )


def test_an_older_llama_cpp_has_a_share_of_memory() -> None:
    text = PAGES["llamacpp"] + "llamacpp:kv_cache_usage_ratio 0.375\n"
    assert findings_of(ENGINES["llamacpp"], text).load.memory_used == 0.375


def test_every_kind_of_the_flag_has_a_row() -> None:
    assert set(KINDS) == ENGINES.keys()
    assert {kind for kind, row in ENGINES.items() if row.metrics} == PAGES.keys()


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
    assert findings_of(ENGINES["vllm"], text) == (LoadSample(), 0, 0)
