"""Configuration of the core: one frozen tree, its validation and its hash.

    YAML ─▶ dict ─▶ `parse` ─▶ RoutingPolicy ─▶ `policy_hash` ─▶ every receipt

The shell reads the file (the core has no YAML) and hands the mapping over. An error is one sentence
with the place, such as `classes.inline: ttft_s must be at least 0`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final, Literal

import msgspec

from kvstore.wording import why_not

PolicyName = Literal["cost", "least-load", "round-robin", "session"]

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Count = Annotated[int, msgspec.Meta(ge=1)]


class PolicyCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Values with which policy `cost` predicts; learned weights (`learning`) correct the terms."""

    prefill_tokens_per_s: _Positive = 8000.0
    """Prefill speed of an engine on an empty context."""
    attention_tokens: _Positive = 32768.0
    """Context at which a token takes twice as long as at the start of a prompt."""
    kv_bytes_per_token: _Positive = 131072.0
    dram_bytes_per_s: _Positive = 20e9
    file_bytes_per_s: _Positive = 3e9
    network_bytes_per_s: _Positive = 10e9
    stream_share: _NotNegative = 0.002
    """Decode interference: each running stream makes a prefill this much longer."""
    base_s: _NotNegative = 0.005
    """TTFT of an empty prompt on an idle worker."""
    load_weight: _NotNegative = 1.0
    """Seconds that the request delays others, per second of work it brings."""
    stream_weight: _NotNegative = 0.05
    """Cost in seconds of delaying one running stream by a second."""
    young_weight: _NotNegative = 0.5
    """The same for a stream that has just begun: a pause is not spread over many tokens yet."""
    keep_weight: _NotNegative = 1.0
    """Weight of evicted prefixes that other requests recompute."""


class PolicyChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Choice among the best."""

    top_k: _Count = 3
    """Random choice among so many best workers whose costs exceed the best …"""
    within_share: _NotNegative = 0.05
    """… by at most this share, or by 5 ms."""
    fallback_count: Annotated[int, msgspec.Meta(ge=0, le=16)] = 2
    """Further workers named to a gateway, in order."""


class PolicyLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filters. A request that no worker may take is queued in the router."""

    queue_max: _Count | None = None
    """Most requests at a worker before their first token; null: no limit."""
    running_max: _Count | None = None
    """Most requests at a worker; null: no limit."""
    memory_ceiling: _Share = 0.95
    """Highest use of a KV cache, the request included, while requests wait in its engine."""
    held_max: _Count = 16384
    """Queued requests of all classes; beyond, the lowest class is rejected."""
    holds_without_workers: bool = False
    """Scale from zero: requests for a pool without workers wait instead of failing with 503."""
    hot_factor: _Positive = 4.0
    """Hot-spot guard: no prefix credit for this request at a worker whose queue is so many times
    the mean of the others, and longer than that mean and computing the whole prompt."""


class PolicyProbes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Probes of engines. A late answer is an answer: it only makes the worker less preferred."""

    period_s: _Positive = 1.0
    """Time between two probes of a worker; longer with more than 50 workers."""
    late_s: _Positive = 1.0
    """Time without an answer after which a probe is late."""
    silence_s: _Positive = 12.0
    """Time without an answer to a probe or a byte of any response, after which a worker is down,
    and requests that wait for it go to others that are up."""


class PolicyRaces(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A second worker for a streamed request without side effects whose first byte is late."""

    is_on: bool = False
    after_s_min: _Positive = 0.5
    """Not before this."""
    share: _Share = 0.05
    """Budget of hedged requests, as a share of requests."""
    burst: _Count = 16
    """Largest unused budget of hedged requests."""


class PolicyLearning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights of the terms from predicted and achieved TTFT."""

    is_frozen: bool = False
    """Weights stay as they are."""


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
    """Thresholds follow the measured times, between 64 and the next one."""
    learned_most: _Count = 8192


class PoolRoles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the planner in one pool."""

    prefill_min: Annotated[int, msgspec.Meta(ge=0)] = 1
    """Least number of prefill workers."""
    decode_min: _Count = 1
    """Least number of workers for whole requests."""


class PolicyPlanner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Roles of workers with `role=any`, by what the pool lacks."""

    is_on: bool = False
    """No: roles do not change; a worker with `role=any` starts as `both`."""
    ttft_s: _Positive = 2.0
    """Objective of the first token, …"""
    itl_s: _Positive = 0.05
    """… and of the mean time between tokens of an answer."""
    streams_max: _Positive = 64.0
    """Streams at a worker that decodes, in the mean."""
    window_s: _Positive = 3.0
    """Time over which numbers are smoothed."""
    dwell_s: _NotNegative = 2.0
    """Time for which a shortage of workers must last."""
    cooldown_s: _NotNegative = 10.0
    """Time between two changes."""
    pools: dict[str, PoolRoles] = {}
    """By the value of `pool=`; not named: the defaults."""


class PolicyAhead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Blocks brought to dram before an engine asks, and clients' pins."""

    is_on: bool = True
    """No: neither prefetch nor pins."""
    tokens_min: _Count = 256
    """Least number of tokens to prefetch, and of a hot prefix."""
    open_max: _Count = 256
    """Prefetches in flight."""
    hot_requests: _Positive = 8.0
    """Requests from which a prefix is hot."""
    hot_s: _Positive = 30.0
    """Half-life of a request in `hot_requests`."""
    copies_max: _Count = 2
    """Concurrent copies of hot prefixes."""
    copy_bytes_per_s: _NotNegative = 268435456.0
    """Mean rate of these copies; 0: none."""
    pin_s_max: _Positive = 3600.0
    """Longest pin of a client."""
    pins_per_tenant: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 64
    """Pins per tenant; 1,024 for all tenants together."""
    touch_s: _Positive = 30.0
    """Interval between two touches of a pinned prompt."""


class ServiceClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Class of service."""

    rank: Annotated[int, msgspec.Meta(ge=0)]
    """0 is the most urgent."""
    ttft_s: _NotNegative = 0.0
    """Objective; 0: none. A request whose predicted TTFT exceeds it is rejected early."""
    queue_max: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Most queued requests of the class; null: no limit, like those below."""
    ttl_s: _Positive | None = None
    """Longest time in the queue."""
    backlog_s: _Positive | None = None
    """Prefill ahead at the best worker from which a request of the class is queued."""
    yield_s: _Positive | None = None
    """The same, if a more urgent request was sent in the last ten seconds."""
    saturation_max: _Positive | None = None
    """Queued while the pool's saturation is above this (degradation ladder)."""
    tenants: tuple[str, ...] = ()
    """Tenants that may name a class more urgent than the default one; `*`: every client."""


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


def _classes() -> dict[str, ServiceClass]:
    return {
        "inline": ServiceClass(rank=0, ttft_s=1.0, queue_max=256, ttl_s=2.0),
        "interactive": ServiceClass(rank=1, yield_s=0.2),
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
    """One of cost, least-load, round-robin, session."""
    costs: PolicyCosts = PolicyCosts()
    choice: PolicyChoice = PolicyChoice()
    limits: PolicyLimits = PolicyLimits()
    learning: PolicyLearning = PolicyLearning()
    split: PolicySplit = PolicySplit()
    probes: PolicyProbes = PolicyProbes()
    races: PolicyRaces = PolicyRaces()
    planner: PolicyPlanner = PolicyPlanner()
    ahead: PolicyAhead = PolicyAhead()
    classes: dict[str, ServiceClass] = msgspec.field(default_factory=_classes)
    default_class: str = "interactive"
    """Class of requests without the header `X-Kvstore-Class`."""
    draining: tuple[str, ...] = ()
    """Workers that finish their requests and get no new ones."""
    tenants: dict[str, _Positive] = {}
    """Tenant → share; not named: 1."""
    models: dict[str, ModelRule] = {}
    """Empty: every model that a worker serves, in all pools that serve it."""
    session_ttl_s: _Positive = 300.0
    """A session stays in its pool while that has a weight, and with policy `session` at its worker,
    for so long after its last request."""
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
    if place := _not_finite(msgspec.to_builtins(policy)):
        raise ValueError(f"{place} must be a finite number")
    for sentence in _faults(policy):
        raise ValueError(sentence)
    return policy


def _not_finite(value: object, place: str = "") -> str:
    """Place of an infinite number or a NaN, which YAML can write; empty: there is none."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else place
    children: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict):
        children = ((f"{place}." * bool(place) + str(key), its) for key, its in value.items())
    elif isinstance(value, list | tuple):
        children = ((f"{place}[{number}]", its) for number, its in enumerate(value))
    return next(filter(None, (_not_finite(its, str(where)) for where, its in children)), "")


def _parts(mapping: dict[str, Any]) -> Iterator[_Part]:
    """(place, value, kind) of the structs inside, innermost first, so that an error names its
    place.
    """
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
    """One sentence for each conflict between values that are valid by themselves."""
    if policy.default_class not in policy.classes:
        known = ", ".join(policy.classes)
        yield f"default_class {policy.default_class!r} is no class: write one of {known}"
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
    field.name: field.type
    for field in msgspec.structs.fields(RoutingPolicy)
    if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
}
"""Keys of the policy file with a mapping of fixed keys."""
