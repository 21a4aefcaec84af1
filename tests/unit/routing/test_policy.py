"""The policy file: one sentence for each error, a hash that does not depend on the order."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.routing.policy import RoutingPolicy, parse, policy_hash

WRONG: list[tuple[object, str]] = [
    (3, "the policy must be a mapping, such as `policy: cost`"),
    ({"policy": "x"}, "policy 'x' must be one of cost, least-load, round-robin, session"),
    ({"clases": {}}, "unknown key 'clases': did you mean 'classes'?"),
    ({"classes": {"a": {"rank": 0, "ttft": 1}}}, "classes.a: unknown key 'ttft'"),
    ({"classes": {"a": {"rank": -1}}}, "classes.a: rank must be at least 0"),
    ({"models": {"a": {"pools": [{"pol": 1}]}}}, "models.a.pools[0]: unknown key 'pol'"),
    ({"models": {"a": {"pools": [{"weight": 1}]}}}, "models.a.pools[0]: pool is missing"),
    ({"limits": 3}, "limits: must be a mapping, not a number"),
    ({"models": {"a": ["b"]}}, "models.a: must be a mapping, not a list"),
    ({"costs": {"base_s": "x"}}, "costs: base_s must be a number, not a text"),
    ({"tenants": {"a": 0}}, "a value of tenants must be more than 0"),
    ({"choice": {"top_k": 0}}, "choice: top_k must be at least 1"),
    ({"costs": {"prefill_tokens_per_s": 0}}, "costs: prefill_tokens_per_s must be more than 0"),
    ({"default_class": "x"}, "default_class 'x' is no class: write one of inline,"),
    ({"costs": {"overlap": "queue"}}, "costs: unknown key 'overlap'"),
    ({"weights": {"prefix": 1}}, "unknown key 'weights'"),
    ({"models": {"a": {"pools": [{"pool": "p", "weight": 0}]}}}, "models.a: at least one pool"),
    ({"models": {"a": {"aliases": ["b"]}, "b": {}}}, "models.b: 'b' is already a name of 'a'"),
    ({"limits": {"attempts_max": 3}}, "limits: unknown key 'attempts_max'"),
    ({"limits": {"queue_max": 0}}, "limits: queue_max must be at least 1"),
    ({"probes": {"silence_s": 0}}, "probes: silence_s must be more than 0"),
    ({"draining": "w0"}, "draining must be a list, not a text"),
    ({"classes": {"a": {"rank": 0, "tenants": "x"}}}, "classes.a: tenants must be a list"),
]


@pytest.mark.parametrize(("mapping", "sentence"), WRONG, ids=[s[:30] for _, s in WRONG])
def test_an_error_is_one_sentence_with_its_place(mapping: object, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(mapping)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_an_empty_file_is_the_default() -> None:
    assert parse({}) == RoutingPolicy()


def test_null_is_no_limit() -> None:
    names = ("queue_max", "ttl_s", "backlog_s", "yield_s", "saturation_max")
    given: dict[str, Any] = {"rank": 3, **dict.fromkeys(names)}
    policy = parse({"limits": {"queue_max": None}, "classes": {"interactive": given}})
    assert policy.limits.queue_max is None
    assert {getattr(policy.classes["interactive"], name) for name in names} == {None}


def test_the_hash_is_of_the_meaning() -> None:
    one: dict[str, Any] = {"policy": "cost", "tenants": {"a": 2.0, "b": 1.0}}
    other: dict[str, Any] = {"tenants": {"b": 1.0, "a": 2.0}, "policy": "cost"}
    assert policy_hash(parse(one)) == policy_hash(parse(other))
    other["tenants"]["a"] = 3.0
    assert policy_hash(parse(one)) != policy_hash(parse(other))
