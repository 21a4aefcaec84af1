"""Golden plans, each with its calculation by hand, and the measured rows of the demo."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import mean
from typing import Any, Final

import pytest
from click.testing import CliRunner

from kvstore.cli.main import cli
from kvstore.units import GIB, KIB, MIB
from tests.unit.plan.configs import GDN, MLA, dense, windows

LLAMA_8B: Final = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
LLAMA_70B: Final = LLAMA_8B | {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}
SMALL: Final = {"intermediate_size": 4096, "vocab_size": 32000}
"""For configurations of which only the caches are looked at."""
DEEPSEEK_V3: Final = MLA | {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "num_nextn_predict_layers": 1,
}
JAMBA: Final = dense(32) | {
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
GDN_STATE: Final = 3 * (2 * 16 * 128 + 32 * 128) * 2 + 32 * 128 * 128 * 4
GOLDEN: Final[dict[str, tuple[dict[str, Any], str, dict[str, int]]]] = {
    # 32 layers × 2 × 8 heads × 128 × 2 bytes = 128 KiB a token; 1,000 tokens.
    "dense GQA 8B": (LLAMA_8B, "", {"prompt": 1000 * 128 * KIB, "sequence": 1100 * 128 * KIB}),
    # 80 × 2 × 8 × 128 × 2 = 320 KiB.
    "dense GQA 70B": (LLAMA_70B, "--tp 4", {"prompt": 1000 * 320 * KIB}),
    # 61 × (512 + 64) × 2 = 70,272, on each of 8 ranks, kept once.
    "MLA": (DEEPSEEK_V3, "--tp 8 --weight-dtype fp8 --gpu H200", {"prompt": 1000 * 70272}),
    # One layer more: 62 × 1,152.
    "MTP": (
        DEEPSEEK_V3,
        "--tp 8 --weight-dtype fp8 --gpu H200 --mtp 1",
        {"prompt": 1000 * 62 * 1152},
    ),
    # 36 layers × 2 × 8 × 64 × 2 = 2 KiB each; windows need 128 of 1,100 tokens, kvstore keeps all.
    "windows, gpt-oss": (
        windows("wf" * 18, 8, 64, 128),
        "",
        {"prompt": 1000 * 72 * KIB, "sequence": 18 * 2 * KIB * (128 + 1100)},
    ),
    # 62 layers × 2 × 16 × 128 × 2 = 8 KiB each: 52 of windows, 10 full.
    "windows, Gemma 3": (
        dense(62, 16, sliding_window=1024, sliding_window_pattern=6),
        "",
        {"prompt": 1000 * 62 * 8 * KIB, "sequence": 8 * KIB * (52 * 1024 + 10 * 1100)},
    ),
    # 12 full layers × 2 × 2 × 256 × 2 = 2 KiB each, and 36 states.
    "hybrid, Qwen3-Next": (
        dense(48, 2, 256) | GDN,
        "",
        {"prompt": 12 * 2 * KIB * 1000 + 36 * GDN_STATE},
    ),
    # 4 layers × 4 KiB; 28 states of Mamba 1: 8,192 × (3 + 16) × 2 bytes.
    "hybrid, Jamba": (JAMBA, "", {"prompt": 4 * 4 * KIB * 1000 + 28 * 8192 * 19 * 2}),
    "fp8 KV": (LLAMA_8B, "--kv-dtype fp8", {"prompt": 1000 * 64 * KIB}),
    # 2 KV heads on 4 ranks: 2 ranks have the same, and kvstore keeps 2 × 32 × 2 × 128 × 2 a token.
    "TP with replicated heads": (
        LLAMA_8B | {"num_key_value_heads": 2},
        "--tp 4",
        {"prompt": 1000 * 32 * KIB},
    ),
    "PP": (LLAMA_70B, "--pp 4", {"prompt": 1000 * 320 * KIB}),
    # A chunk of 512 for 3 of 4 layers: 48 × 4 KiB each; 36 × 512 + 12 × 1,100 tokens.
    "chunks": (
        dense(48, attention_chunk_size=512),
        "",
        {"prompt": 1000 * 192 * KIB, "sequence": 4 * KIB * (36 * 512 + 12 * 1100)},
    ),
}


def _run(tmp_path: Path, config: dict[str, Any], flags: str) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"text_config": SMALL | config}))
    result = CliRunner().invoke(cli, ["plan", str(tmp_path), *flags.split()])
    assert result.exit_code == 0, result.output + str(result.exception)
    return json.loads(result.output) if "--json" in flags else result.output


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_plans(name: str, tmp_path: Path) -> None:
    config, flags, expected = GOLDEN[name]
    flags += " --prompt-tokens 1000 --output-tokens 100 --users 10 --json"
    plan = _run(tmp_path, config, flags)
    assert {key: plan[f"{key}_bytes"] for key in expected} == expected


def test_times_of_a_dense_model_are_those_of_the_roofline(tmp_path: Path) -> None:
    flags = "--prompt-tokens 10000 --reused 0.8 --overhead-ms 0 --mfu 0.5 --json"
    plan = _run(tmp_path, LLAMA_8B, flags)
    # Published: 8.03 B parameters. A token: all but the input embedding (525 M), 7.5 B × 2 FLOP,
    # and 2 × 32 layers × 32 heads × 128 × 10,000 tokens of attention; 989 TFLOP/s, half of it.
    assert plan["weights"]["total"] == pytest.approx(8.03e9, rel=0.001)
    token_s = (2 * 7.504e9 + 2 * 32 * 4096 * 10_000) / (989e12 * 0.5)
    assert plan["token_s"] == pytest.approx(token_s, rel=0.001)
    # dram: 8,000 tokens × 128 KiB at 0.8 × 64 GB/s, and 2,000 tokens computed.
    load_s = 8000 * 128 * KIB / 51.2e9
    assert plan["tiers"][0]["load_s"] == pytest.approx(load_s + 2000 * token_s, rel=0.001)
    assert plan["push_s"] == pytest.approx(10_000 * 128 * KIB / 50e9, rel=0.001)


def test_parameters_of_a_mixture_are_those_published(tmp_path: Path) -> None:
    flags = "--tp 8 --weight-dtype fp8 --gpu H200 --json"
    weights = _run(tmp_path, DEEPSEEK_V3, flags)["weights"]
    # DeepSeek-V3's report: 671 B, 37 B activated.
    assert weights["total"] == pytest.approx(671e9, rel=0.01)
    assert weights["active"] == pytest.approx(37e9, rel=0.03)


@pytest.mark.parametrize("prompt_tokens", [200, 300, 600])
def test_what_is_faster_is_faster_on_the_same_screen(prompt_tokens: int, tmp_path: Path) -> None:
    """The overhead is that of a computed prompt as well as of a loaded one."""
    plan = _run(tmp_path, LLAMA_8B, f"--prompt-tokens {prompt_tokens} --reused 1 --tp 8 --json")
    for tier in plan["tiers"]:
        least = tier["breakeven_tokens"] or math.inf
        assert (least < 2 * prompt_tokens) == (tier["load_s"] < plan["miss_ttft_s"]), tier


def test_dram_is_at_most_half_of_a_small_machine(tmp_path: Path) -> None:
    lines = _run(tmp_path, LLAMA_8B, "--users 100 --host-memory 1GiB").splitlines()
    assert lines[-3].startswith("kvstore node --dram 512MiB --file ")


def test_a_slow_disk_never_pays(tmp_path: Path) -> None:
    plan = _run(tmp_path, LLAMA_8B, "--disk-rate 1GB --json")
    assert [tier["breakeven_tokens"] is None for tier in plan["tiers"]] == [False, True, False]


def test_the_screen_ends_with_flags_and_the_path(tmp_path: Path) -> None:
    lines = _run(tmp_path, LLAMA_8B, "--users 100 --host-memory 128GiB").splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    # 100 × 8,500 × 128 KiB = 103.8 GiB, more than half of the memory.
    assert lines[-3] == "kvstore node --dram 64GiB --file /var/lib/kvstore:104GiB"
    assert lines[-1].startswith("Path: one node: ")


@pytest.mark.parametrize(
    ("flags", "path"),
    [
        ("--requests-per-s 1", "one node"),
        ("--requests-per-s 400 --output-tokens 1000 --reused 0", "prefill and decode"),
        ("--requests-per-s 400 --output-tokens 2", "cluster"),
        ("--requests-per-s 400 --output-tokens 1000 --reused 0 --network 1GB", "cluster"),
    ],
)
def test_the_path_follows_the_work(flags: str, path: str, tmp_path: Path) -> None:
    assert _run(tmp_path, LLAMA_8B, f"{flags} --json")["path"].startswith(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "is no JSON"), ("[]", "no JSON object"), ('{"a":' * 100000, "is no JSON")],
)
def test_a_file_that_is_no_configuration(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    result = CliRunner().invoke(cli, ["plan", str(tmp_path)])
    assert said in str(result.exception)


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    result = CliRunner().invoke(cli, ["plan", str(tmp_path)])
    assert "do not fit 1 GPUs of 80 GB: raise --tp or --pp" in str(result.exception)
    result = CliRunner().invoke(cli, ["plan", str(tmp_path), "--pp", "81"])
    assert "--pp 81 is more than the model's 80 layers: choose less" in str(result.exception)


DEMO: Final = Path(__file__).parents[3] / "bench" / "results" / "demo.json"


@pytest.mark.parametrize("row", ["with kvstore", "node restarted"])
def test_rows_of_the_demo_are_predicted_from_two_others(row: str, tmp_path: Path) -> None:
    """The time of a token is measured by vLLM alone, the rate of dram by the restarted engine. The
    record has no rate of the disk, from which the restarted node loads: dram's is used."""
    record = json.loads(DEMO.read_text())
    runs = {run["name"]: run for run in record["runs"]}
    model, requests = record["model"], runs[row]["answers"]
    config = LLAMA_8B | {
        "num_hidden_layers": model["layer_count"],
        "hidden_size": model["hidden"],
        "num_attention_heads": model["head_count"],
        "num_key_value_heads": model["kv_head_count"],
        "intermediate_size": model["intermediate"],
    }
    # 8 layers × 2 × 4 heads × 64 × 4 bytes.
    token_bytes = 16 * KIB
    rounds = {name: run["ttft_ms_by_round"] for name, run in runs.items()}
    ttft_s = {name: mean(ms for one in its for ms in one) / 1000 for name, its in rounds.items()}
    alone, restarted = runs["vLLM alone"], runs["engine restarted"]
    token_s = ttft_s["vLLM alone"] * requests / alone["computed_tokens"]
    loads_s = ttft_s["engine restarted"] * requests - restarted["computed_tokens"] * token_s
    rate = int(restarted["kvstore_hit_tokens"] * token_bytes / loads_s)
    run = runs[row]
    loaded, computed = run["kvstore_hit_tokens"], run["computed_tokens"]
    flags = (
        f"--kv-dtype fp32 --overhead-ms 0 --token-us {token_s * 1e6} --dram-rate {rate}"
        f" --prompt-tokens {(loaded + computed) // requests}"
        f" --reused {loaded / (loaded + computed)}"
    )
    plan = _run(tmp_path, config, f"{flags} --json")
    assert plan["prompt_bytes"] == (loaded + computed) // requests * token_bytes
    assert plan["tiers"][0]["load_s"] == pytest.approx(ttft_s[row], rel=0.2)


def test_sizes_are_readable(tmp_path: Path) -> None:
    text = _run(tmp_path, LLAMA_8B, "--prompt-tokens 8192")
    assert "full attention         128 KiB a token" in text
    assert "1 GiB kept by kvstore" in text
    assert 8192 * 128 * KIB == GIB == 1024 * MIB


@pytest.mark.parametrize("option", ["flops", "mfu", "overhead-ms", "requests-per-s", "reused"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_what_is_no_number_is_refused(tmp_path: Path, option: str, value: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    result = CliRunner().invoke(cli, ["plan", str(tmp_path), f"--{option}", value])
    assert result.exit_code == 2
    assert option in result.output + str(result.exception)


@pytest.mark.parametrize("option", ["flops", "mfu", "requests-per-s"])
def test_what_is_nearly_nothing_is_refused(tmp_path: Path, option: str) -> None:
    """Quotients of it are no numbers."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    result = CliRunner().invoke(cli, ["plan", str(tmp_path), f"--{option}", "5e-324"])
    assert result.exit_code == 2
    assert "is not in the range 1e-06" in result.output + str(result.exception)


@pytest.mark.parametrize("option", ["gpu-memory", "host-memory", "dram-rate", "disk-rate"])
def test_a_size_without_its_unit_is_refused(tmp_path: Path, option: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    result = CliRunner().invoke(cli, ["plan", str(tmp_path), f"--{option}", "6"])
    assert result.exit_code == 2
    assert "'6' is less than 1 MiB: give it with its unit, such as 6GB" in result.output


def test_a_file_is_complained_about_by_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "e.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    for place, name in {"e.json": f"{tmp_path}/e.json", "": "config.json"}.items():
        result = CliRunner().invoke(cli, ["plan", str(tmp_path / place)])
        assert str(result.exception).startswith(f"{name} has no ")


@pytest.mark.parametrize("flags", [("top", "--interval"), ("inspect", "savings", "--gpu-hour")])
def test_no_number_is_refused_elsewhere_too(flags: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, [*flags, "nan"], standalone_mode=False)
    assert "is no number" in str(result.exception)
