"""Expected seconds to the first token at each worker, term by term: policy `cost`.

    TTFT = base + queue + load + compute + interference (+ link: from prefill to decode)

A worker may use the prefix that its engine holds, or load more: from dram of its node, from its
files, from dram of another node. Each way costs a load and saves compute; the cheapest counts.
A load runs while the request is in the engine's queue, so only what lasts longer than the queue is
seen.

Lengths are expectations: a length times the trust in its source times the observed ratio of cached
to predicted tokens. The score adds `others`, seconds that the request costs others, which is no
part of its own TTFT: compute displaces the requests that come after it and evicts prefixes.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvstore.routing.features import TRUSTS, Case, FeatureColumn
from kvstore.routing.policy import PolicyCosts, RoutingPolicy
from kvstore.routing.rows import Floats, Term
from kvstore.routing.values import PrefixTrust

NETWORK_S: Final = 0.001
"""Latency of a transfer between nodes, in seconds."""
TRUSTED: Final = {
    PrefixTrust.EXACT: 1.0,
    PrefixTrust.CATCHING_UP: 1.0,
    PrefixTrust.STALE: 0.5,
    PrefixTrust.APPROXIMATE: 0.8,
    PrefixTrust.NONE: 0.0,
}
"""Expected share of a prefix length that is really there, by its source."""
TRUST_FACTORS: Final = np.array([TRUSTED[trust] for trust in TRUSTS])
CONGESTION_MAX: Final = 4.0
"""Upper bound of both factors in `others_per_s`, congestion and reuse: both formulas have
a pole.
"""


def compute_s(uncached: Floats, prompt_tokens: int, costs: PolicyCosts) -> Floats:
    """Seconds to prefill the last `uncached` tokens of a prompt: each attends to all before it."""
    context = prompt_tokens - uncached / 2
    return uncached / costs.prefill_tokens_per_s * (1 + context / costs.attention_tokens)


def terms(columns: Floats, policy: RoutingPolicy, case: Case) -> tuple[Floats, Floats]:
    """(seconds that the request costs at each worker, by Term; tokens that each one computes)."""
    queue, costs, prompt_tokens = columns[FeatureColumn.QUEUE_S], policy.costs, case.prompt_tokens
    expected = TRUST_FACTORS.take(columns[FeatureColumn.TRUST].astype(np.intp))
    expected = expected * columns[FeatureColumn.HIT_RATIO]
    if np.count_nonzero(queue):
        expected[_hot(queue, prompt_tokens, policy)] = 0.0
    lengths, loads = _ways(columns, costs)
    uncached = np.maximum(1.0, prompt_tokens - lengths * expected)
    compute = compute_s(uncached, prompt_tokens, costs)
    seen_load = np.maximum(0.0, loads - queue)
    if len(loads) > 1:
        way, each = np.argmin(seen_load + compute, axis=0), np.arange(len(queue))
        load, work, tokens = seen_load[way, each], compute[way, each], uncached[way, each]
    else:
        load, work, tokens = seen_load[0], compute[0], uncached[0]
    made = np.zeros((len(Term), len(queue)))
    made[Term.BASE] = costs.base_s
    made[Term.QUEUE] = queue
    made[Term.LOAD] = load
    made[Term.COMPUTE] = work
    streams = columns[FeatureColumn.STREAMS]
    made[Term.INTERFERENCE] = work * costs.stream_share * streams
    stalled = costs.stream_weight * streams
    stalled += costs.young_weight * columns[FeatureColumn.YOUNG]
    made[Term.OTHERS] = work * (case.pressure + stalled)
    link = columns[FeatureColumn.LINK]
    if np.count_nonzero(link):
        has_link = link > 0
        sent = tokens * costs.kv_bytes_per_token / np.where(has_link, link, 1.0)
        made[Term.LINK] = np.where(has_link, NETWORK_S + sent, 0.0)
    return made, tokens


def _ways(columns: Floats, costs: PolicyCosts) -> tuple[Floats, Floats]:
    """(leading tokens, seconds to load them), each 4 × workers: from hbm, dram, file, another node.
    Only the first row if no tier has anything.
    """
    own = columns[FeatureColumn.HBM : FeatureColumn.REMOTE + 1]
    if not np.count_nonzero(own[1:]):
        return own[:1], np.zeros((1, own.shape[1]))
    lengths = np.maximum.accumulate(own, axis=0)
    more_bytes = (lengths[1:] - lengths[:-1]) * costs.kv_bytes_per_token
    dram = costs.dram_bytes_per_s
    loads = np.zeros_like(lengths)
    loads[1] = more_bytes[0] / dram
    loads[2] = loads[1] + more_bytes[1] / costs.file_bytes_per_s
    # Another node's dram is an alternative to our own files for what is not in our dram.
    far = np.maximum(0.0, own[3] - lengths[1]) * columns[FeatureColumn.FETCH_RATIO]
    lengths[3] = lengths[1] + far
    beyond = far * costs.kv_bytes_per_token
    loads[3] = loads[1] + np.where(
        beyond > 0, NETWORK_S + beyond / costs.network_bytes_per_s + beyond / dram, 0.0
    )
    return lengths, loads


def _hot(
    queue: Floats, prompt_tokens: int, policy: RoutingPolicy
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Hot-spot guard: mask of the workers where waiting takes much longer than waiting elsewhere
    and computing the whole prompt. Their prefixes do not count, for this request alone.
    """
    mean = (queue.sum() - queue) / max(1, len(queue) - 1)  # of the others
    whole = compute_s(np.full_like(queue, prompt_tokens), prompt_tokens, policy.costs)
    return np.asarray((queue > policy.limits.hot_factor * mean) & (queue > mean + whole))


def others_per_s(costs: PolicyCosts, *, utilisation: float, hit_share: float) -> float:
    """Seconds that a second of compute costs others.

    Delay: work on a server that is busy for a share u of the time delays u / (1 - u) times its
    length in sum, since as many requests come before the queue is empty again. Keep: tokens that
    are computed take the place of cached ones; with a share h of tokens hit, a cached token is hit
    h / (1 - h) times before it leaves.
    """
    congestion = min(CONGESTION_MAX, utilisation / max(1e-3, 1 - utilisation))
    reuse = min(CONGESTION_MAX, hit_share / max(1e-3, 1 - hit_share))
    return costs.load_weight * congestion + costs.keep_weight * reuse
