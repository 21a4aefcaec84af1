"""Configuration of the core: one frozen tree, its validation and its hash.

    YAML ─▶ dict ─▶ `parse` ─▶ RoutingPolicy ─▶ `policy_hash` ─▶ every receipt

The shell reads the file (the core has no YAML) and hands the mapping over. An error is one sentence
with the place, such as `classes.inline: ttft_s must be at least 0`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, get_args

import msgspec

from kvstore.routing.values import PrefixTrust
from kvstore.wording import why_not

PolicyName = Literal["cost", "prefix-load", "least-load", "round-robin", "session", "weighted"]
POLICY_NAMES: Final = get_args(PolicyName)

UNBOUNDED: Final = 100.0
"""Saturation that no pool has: a class with this bound is never held for saturation."""
_Positive = Annotated[float, msgspec.Meta(gt=0)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Count = Annotated[int, msgspec.Meta(ge=1)]


_TRUST: Final = {"exact": 1.0, "catching-up": 1.0, "stale": 0.5, "approximate": 0.8, "none": 0.0}


class PolicyCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Start values of what is measured, for policy `cost`."""

    prefill_tokens_per_s: _Positive = 8000.0
    """Prefill speed of an engine on an empty context."""
    attention_tokens: _Positive = 32768.0
    """Context at which a token takes twice as long as at the start of a prompt."""
    kv_bytes_per_token: _Positive = 131072.0
    dram_bytes_per_s: _Positive = 20e9
    file_bytes_per_s: _Positive = 3e9
    network_bytes_per_s: _Positive = 10e9
    network_s: _NotNegative = 0.001
    """Start of a transfer between nodes."""
    stream_share: _NotNegative = 0.002
    """Decode interference: each running stream makes a prefill this much longer."""
    adapter_s: _NotNegative = 0.2
    """Load of a LoRA adapter that a worker does not have."""
    base_s: _NotNegative = 0.005
    """TTFT of an empty prompt on an idle worker."""
    overlap: Literal["queue", "compute"] = "queue"
    """Tiers load while the request is in the engine's queue (kvstore's connector, asynchronous), or
    while the rest of the prompt is computed (engines that load by layer)."""
    trust: dict[str, _Share] = msgspec.field(default_factory=_TRUST.copy)
    """Expected share of a prefix length that is really there, by its source."""
    load_weight: _NotNegative = 1.0
    """Seconds that the request delays others, per second of work it brings."""
    stream_weight: _NotNegative = 0.05
    """Seconds that delaying one running stream by a second counts."""
    young_weight: _NotNegative = 0.5
    """The same for a stream that has just begun: a pause is not spread over many tokens yet."""
    keep_weight: _NotNegative = 1.0
    """Seconds of prefixes that it evicts, which others compute again."""


class PolicyChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Choice among the best."""

    top_k: _Count = 3
    """Size of the draw: the best workers, as far as their costs are close …"""
    within_share: _NotNegative = 0.05
    """… by this share of the best cost, …"""
    within_s: _NotNegative = 0.005
    """… or by these seconds."""
    fallback_count: Annotated[int, msgspec.Meta(ge=0, le=16)] = 2
    """Further workers named to a gateway, in order."""


class PolicyLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filters and health."""

    queue_max: _Count = 128
    """Requests at a worker before their first token."""
    running_max: _Count = 1024
    """Requests at a worker in all."""
    memory_ceiling: _Share = 0.95
    """Share of the KV cache that a request may fill with its need."""
    stale_s: _Positive = 2.0
    """Scraped numbers older than this decay to the pool's mean, by half each `stale_s`."""
    urgent_s: _Positive = 10.0
    """Time for which a request counts as recent in `yield_s` of classes."""
    held_max: _Count = 16384
    """Held requests of all classes: beyond, the lowest class makes room."""
    saturated_s: _Positive = 2.0
    """Prefill ahead at a worker that counts as saturated."""
    holds_without_workers: bool = False
    """Scale from zero: requests for a pool without workers are held, not answered 503."""
    hot_factor: _Positive = 4.0
    """Hot-spot guard: no prefix credit for this request at a worker whose queue is so many times
    the mean of the others, and longer than that mean and computing the whole prompt."""
    failures_max: _Count = 3
    cooldown_ms: _Count = 1000
    attempts_max: _Count = 3
    """Attempts of one request."""
    retry_share: _Share = 0.2
    """Retries at most, as a share of requests (budget)."""
    timeout_factor: _Positive = 5.0
    timeout_s_min: _Positive = 10.0
    """An attempt fails after `timeout_factor` times the predicted TTFT, at least this."""
    retry_burst: _Count = 256
    """Retries that the budget saves up."""
    race_after_s: _NotNegative = 0.0
    """Race a second worker after this; 0: never."""


class PolicyLearning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights of the terms from predicted and achieved TTFT."""

    is_frozen: bool = False
    """Weights stay as they are."""
    rate: _Share = 0.05
    """Weight of one observation."""
    least: _Positive = 0.25
    """Lower bound of a weight."""
    most: _Positive = 4.0
    """Upper bound of a weight."""


class PolicySplit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Local or remote prefill: start values and bounds."""

    is_on: bool = True
    """No: prefill is always local."""
    uncached_min: _Count = 256
    """Uncached tokens from which a prefill is remote."""
    busy_uncached_min: _Count = 64
    """The same, while the decode engine has `busy_streams`."""
    busy_streams: _Count = 8
    queue_max: _Count = 10
    """Prompts in the prefill queue, at which a prefill stays local."""
    is_learned: bool = True
    """Thresholds follow the measured times, between the next two."""
    learned_least: _Count = 64
    learned_most: _Count = 8192
    short_tokens: _Count = 512
    """Prompts of the short lane, by uncached tokens."""
    bucket_tokens: tuple[int, ...] = (2048, 8192, 32768)
    """Bounds of the queue's length buckets; shorter prompts go first."""
    aging_s: _Positive = 1.0
    """A prompt that waited so long counts as one of the next shorter bucket."""


class ServiceClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Class of service."""

    rank: int
    """0 is the most urgent."""
    ttft_s: _NotNegative = 0.0
    """Objective; 0: none. A request is rejected early when its predicted TTFT breaks it."""
    queue_max: Annotated[int, msgspec.Meta(ge=0)] = 1024
    """Requests of the class that may be held."""
    ttl_s: _Positive = 60.0
    """Longest time in the queue."""
    backlog_s: _Positive = 30.0
    """With this much prefill ahead at the best worker, a request of the class is held."""
    yield_s: _Positive = 30.0
    """The same, while requests of a more urgent class came within `urgent_s` of `limits`."""
    saturation_max: _Positive = UNBOUNDED
    """Held while the pool's saturation is above this (degradation ladder)."""


class ModelPool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pool of workers behind a model, with its share of sessions."""

    pool: str
    """Value of `pool=` of its workers."""
    weight: _NotNegative = 1.0
    """Share of the sessions, beside the weights of the other pools."""
    served: str = ""
    """Name of the model at these workers; empty: the same."""


class ModelRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that clients may name."""

    pools: tuple[ModelPool, ...] = ()
    """Empty: all pools that serve it."""
    aliases: tuple[str, ...] = ()
    """Further names for clients."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters on this base, which clients name in place of it."""


class PolicyWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Policy `weighted`: points for the usual scorers. Two presets: `usual` and `additive`."""

    prefix: float = 100.0
    """Points for a whole prefix."""
    load: float = 50.0
    """Points for an idle worker."""
    memory: float = 30.0
    """Points for an empty KV cache."""
    preset: Literal["usual", "additive"] = "usual"
    """`usual`: normalised scores × 100/50/30. `additive`: +3 prefix, +1 session, −10 crowded queue,
    +0.5 idle, −1 memory pressure."""


def _classes() -> dict[str, ServiceClass]:
    return {
        "inline": ServiceClass(rank=0, ttft_s=1.0, queue_max=256, ttl_s=2.0),
        "interactive": ServiceClass(rank=1, queue_max=2048, ttl_s=30.0, yield_s=0.2),
        "tolerant": ServiceClass(
            rank=2, queue_max=4096, ttl_s=120.0, backlog_s=4.0, yield_s=0.1, saturation_max=0.95
        ),
        "batch": ServiceClass(
            rank=3, queue_max=16384, ttl_s=3600.0, backlog_s=1.0, yield_s=0.1, saturation_max=0.8
        ),
    }


class RoutingPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy file."""

    policy: PolicyName = "cost"
    """One of cost, prefix-load, least-load, round-robin, session, weighted."""
    costs: PolicyCosts = PolicyCosts()
    choice: PolicyChoice = PolicyChoice()
    limits: PolicyLimits = PolicyLimits()
    learning: PolicyLearning = PolicyLearning()
    split: PolicySplit = PolicySplit()
    weights: PolicyWeights = PolicyWeights()
    classes: dict[str, ServiceClass] = msgspec.field(default_factory=_classes)
    default_class: str = "interactive"
    """Class of requests without the header `X-Kvstore-Class`."""
    tenants: dict[str, _Positive] = {}
    """Tenant → share; not named: 1."""
    models: dict[str, ModelRule] = {}
    """Empty: every model that a worker serves, in all pools that serve it."""
    session_ttl_s: _Positive = 300.0
    """No effect yet: a session's worker is found by its hash, without memory of it."""
    tree_blocks_max: _Count = 1_000_000
    """Blocks that the approximate tree remembers."""
    receipt_workers_max: _Count = 64
    """Workers in a receipt, the best ones."""


_Part = tuple[str, object, type[msgspec.Struct]]


def parse(mapping: object) -> RoutingPolicy:
    """The policy in a mapping of plain values, as YAML gives it.

    Raises:
        ValueError: one sentence for the operator, with the place.
    """
    if not isinstance(mapping, dict):
        raise ValueError("the policy must be a mapping, such as `policy: cost`")  # noqa: TRY004
    parts: list[_Part] = [*_parts(mapping), ("", mapping, RoutingPolicy)]
    for place, value, kind in parts:
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise ValueError(f"{place}: " * bool(place) + why_not(error, kind)) from None
    policy = msgspec.convert(mapping, RoutingPolicy)
    for sentence in _faults(policy):
        raise ValueError(sentence)
    return policy


def _parts(mapping: dict[str, Any]) -> Iterator[_Part]:
    """Structs inside, innermost first, so that an error names its place."""
    for section, kind in _SECTIONS.items():
        if section in mapping:
            yield section, mapping[section], kind
    for section, inner in (("classes", ServiceClass), ("models", ModelRule)):
        children = mapping.get(section)
        for name, value in children.items() if isinstance(children, dict) else ():
            pools = value.get("pools") if isinstance(value, dict) else None
            for number, pool in enumerate(pools if isinstance(pools, list) else ()):
                yield f"{section}.{name}.pools[{number}]", pool, ModelPool
            yield f"{section}.{name}", value, inner


def _faults(policy: RoutingPolicy) -> Iterator[str]:
    """Values that fit by themselves and not together."""
    if policy.default_class not in policy.classes:
        known = ", ".join(policy.classes)
        yield f"default_class {policy.default_class!r} is no class: write one of {known}"
    if policy.learning.least > 1 or policy.learning.most < 1:
        yield "learning: least and most must enclose 1, the weight at the start"
    if missing := {trust.value for trust in PrefixTrust} - policy.costs.trust.keys():
        yield f"costs.trust has no value for {min(missing)!r}: write all or leave it out"
    if list(policy.split.bucket_tokens) != sorted(set(policy.split.bucket_tokens)):
        yield "split.bucket_tokens must rise, such as [2048, 8192, 32768]"
    seen: dict[str, str] = {}
    for model, rule in policy.models.items():
        if rule.pools and sum(pool.weight for pool in rule.pools) <= 0:
            yield f"models.{model}: at least one pool needs a weight above 0"
        for name in (model, *rule.aliases, *rule.adapters):
            if name in seen:
                yield f"models.{model}: {name!r} is already a name of {seen[name]!r}"
            seen[name] = model


def policy_hash(policy: RoutingPolicy) -> str:
    """16 hexadecimal digits; equal for equal policies, whatever order the file had."""
    encoded = msgspec.json.encode(policy, order="deterministic")
    return hashlib.sha256(encoded).hexdigest()[:16]


_SECTIONS: Final[dict[str, type[msgspec.Struct]]] = {
    "costs": PolicyCosts,
    "choice": PolicyChoice,
    "limits": PolicyLimits,
    "learning": PolicyLearning,
    "split": PolicySplit,
    "weights": PolicyWeights,
}
