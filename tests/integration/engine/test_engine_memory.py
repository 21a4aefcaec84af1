"""What a real engine holds in its own memory is in the index, with its connector or without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.cli.ask import node_client
from kvstore.client.index import IndexClient, Tokens
from kvstore.demo.models import BLOCK_TOKENS
from kvstore.engine.why.explain import HashingReport
from kvstore.testing.process import Lab
from tests.integration.engine.nursery import EngineNursery
from tests.integration.engine.support import PATIENT, kvstore, node_for, wait_until
from tests.kit.engines import EngineConfig

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

BLOCKS = 3
PROMPT = tuple(n * n % 200 for n in range(BLOCKS * BLOCK_TOKENS + 5))
OTHER_SPACE = bytes.fromhex("ab" * 32)


@pytest.mark.parametrize("hashes", ["whole", "int"])
def test_what_it_computed_is_found_until_it_forgets(
    vllm: EngineNursery, hashes: str, tiny_model: Path, tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/kv"
    events = {
        "enable_kv_cache_events": True,
        "endpoint": endpoint,
        "replay_endpoint": f"{endpoint}.replay",
    }
    config = EngineConfig(
        model=tiny_model,
        socket=tmp_path / "node.sock",
        connector_extra=PATIENT,
        arguments=("--kv-events-config", json.dumps(events)),
        environment={"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": str(int(hashes == "int"))},
    )
    lab = Lab(tmp_path / "pki")
    by_flag = f"other={endpoint},replay={endpoint}.replay,space={OTHER_SPACE.hex()}"
    flags = [*lab.flags("node", "n1", with_index=True), "--index-listen", "127.0.0.1:0"]
    flags += ["--engine-events", by_flag]
    with (
        vllm.start(config, log=tmp_path / "engine.log") as engine,
        node_for(engine, tmp_path, flags=flags) as node,
        IndexClient([node.index], tls=lab.files("client", "router"), timeout_s=5) as index,
    ):
        with node_client(node.socket) as nodes:
            (hashing,) = nodes.rows("hashings", HashingReport)
        prompt = Tokens(PROMPT, hashing.block_tokens, hashing.hash_seed)

        def in_hbm() -> dict[bool, int]:
            """Leading blocks, by whether the connector or the flag told where."""
            found = {}
            for space in (bytes.fromhex(hashing.space), OTHER_SPACE):
                for match in index.match("default", space, prompt).matches:
                    if match.holder.engine:
                        found[match.holder.engine != "other"] = match.hbm_blocks
            return found

        engine.complete(PROMPT, max_tokens=1)
        wait_until(lambda: in_hbm() == dict.fromkeys((True, False), BLOCKS), "told", seconds=60)
        (tmp_path / "prompt").write_text(json.dumps(PROMPT))
        asked = ("inspect", "prefix", "--tokens-file", str(tmp_path / "prompt"))

        def row() -> tuple[int, str]:
            (row,) = kvstore(node, *asked)["prefix"]["engines"]
            return row["blocks"], row["state"]

        wait_until(lambda: row()[1] == "live", "all that it said is taken in", seconds=60)
        assert row() == (BLOCKS, "live")
        engine.forget()
        engine.warm_up()  # idle, it publishes nothing
        wait_until(lambda: in_hbm() == {}, "it has forgotten", seconds=60)
