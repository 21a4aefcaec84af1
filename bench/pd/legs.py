"""Both legs of a request by hand: one after the other, or at the same time, with times of each.

The decode node's own account of each push (`kvstore explain`) says when its last block was sealed.
"""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, Final, NamedTuple

from kvstore.cli.ask import node_client
from kvstore.demo.engine import SERVED_NAME, VllmServer
from kvstore.engine.why.explain import RequestReport
from kvstore.engine.why.reasons import PushReport
from kvstore.proto import inspect_pb2 as pb
from tests.kit.pd_pair import PdPair

TO_PREFILL: Final[dict[str, Any]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_names = itertools.count(1)


class Legs(NamedTuple):
    """Seconds of one request."""

    prefill_s: float
    """Until the prefill engine had answered."""
    hand_over_s: float
    """From there to the decode engine's first token."""


def prefill_leg(port: int, prompt: Sequence[int], transfer: str = "") -> dict[str, Any] | None:
    """Parameters for the decode engine."""
    body = {"model": SERVED_NAME, "prompt": list(prompt), "max_tokens": 1, "temperature": 0.0}
    parameters = {**TO_PREFILL, **({"kvstore": {"transfer": transfer}} if transfer else {})}
    data = json.dumps({**body, "kv_transfer_params": parameters}).encode()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        found: dict[str, Any] = json.loads(answer.read())
    assert answer.status == 200, found
    answered: dict[str, Any] | None = found.get("kv_transfer_params")
    return answered


def in_turn(p: VllmServer, d: VllmServer, prompt: Sequence[int], transfer: str = "") -> Legs:
    """One after the other, as vLLM's proxies do it."""
    begin = time.perf_counter()
    parameters = prefill_leg(p.port, prompt, transfer)
    prefill_s = time.perf_counter() - begin
    assert parameters is not None, "the prefill engine's answer has no parameters"
    answer = d.complete(prompt, max_tokens=2, extra={"kv_transfer_params": parameters})
    return Legs(prefill_s, answer.ttft_s)


def together(pair: PdPair, prompt: Sequence[int], transfer: str) -> Legs:
    """At the same time, as a router that knows the prefill node does it."""
    early = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": pair.p.config.engine_id,
        "kvstore": {"node": "p", "transfer": transfer},
    }
    with ThreadPoolExecutor(2) as pool:
        begin = time.perf_counter()
        prefill = pool.submit(
            lambda: (prefill_leg(pair.p.port, prompt, transfer), time.perf_counter() - begin)
        )
        extra: dict[str, object] = {"kv_transfer_params": early}
        decode = pool.submit(pair.d.complete, prompt, max_tokens=2, extra=extra)
        _, prefill_s = prefill.result()
        return Legs(prefill_s, decode.result().ttft_s - prefill_s)


def fresh_name() -> str:
    """Name of a transfer of this run."""
    return f"bench-{next(_names)}"


def pushes_of(pair: PdPair, transfer: str) -> tuple[PushReport, ...]:
    """What node d says of this transfer; the story of a request may come a moment later."""
    for _ in range(100):
        with node_client(pair.node_d.socket) as client:
            rows = client.rows("requests", RequestReport, pb.Filter(limit=64))
        # Behind the name is the number of the prompt in its request.
        found = [row for row in rows if row.transfer.partition("/")[0] == transfer]
        if found and found[0].pushes:
            return found[0].pushes
        threading.Event().wait(0.05)
    raise AssertionError(f"node d knows nothing of {transfer}")


def ended_s(pair: PdPair, transfer: str) -> float:
    """Seconds from the decode request's arrival to the end of its push, whole or the run fails."""
    pushes = pushes_of(pair, transfer)
    short = [push for push in pushes if push.reason or push.pushed + push.held < push.blocks]
    assert not short, short
    return max(push.ended_us for push in pushes) / 1e6
