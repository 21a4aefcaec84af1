"""Names of models: aliases, adapters, pools with weights, sessions that stay."""

from __future__ import annotations

import pytest

from kvstore.routing.decide import ADAPTER_S
from kvstore.routing.events import Joined, Scraped
from kvstore.routing.models import ModelMap, ModelSide, ModelUnknown
from kvstore.routing.policy import parse
from kvstore.routing.values import LoadSample
from tests.unit.routing.fleets import arrive, core_of, rejected, request, routed, spec

POLICY = parse(
    {
        "models": {
            "big": {
                "pools": [
                    {"pool": "stable", "weight": 90},
                    {"pool": "canary", "weight": 10, "served": "big-v2"},
                ],
                "aliases": ["gpt"],
                "adapters": ["legal"],
            },
            "small": {},
        }
    }
)


def test_a_canary_gets_its_share_of_sessions() -> None:
    models = ModelMap(POLICY)
    sides = [models.resolve("gpt", session=f"s{n}", request_id="") for n in range(10_000)]
    canary = sum(side.pool == "canary" for side in sides)
    assert 900 <= canary <= 1100
    assert {side.model for side in sides if side.pool == "canary"} == {"big-v2"}


def test_a_session_stays_on_its_side_and_requests_without_one_spread() -> None:
    models = ModelMap(POLICY)
    for n in range(50):
        sides = {models.resolve("big", session=f"s{n}", request_id=f"{k}").pool for k in range(20)}
        assert len(sides) == 1
    loose = {models.resolve("big", session="", request_id=f"{k}").pool for k in range(200)}
    assert loose == {"stable", "canary"}


def test_aliases_and_adapters() -> None:
    models = ModelMap(POLICY)
    side = models.resolve("legal", session="s1", request_id="")
    assert (side.adapter, side.body_model) == ("legal", "legal")
    assert side.model in ("big", "big-v2")
    assert models.resolve("small", session="", request_id="").pool == "small"
    with pytest.raises(ModelUnknown) as caught:
        models.resolve("huge", session="", request_id="")
    assert caught.value.known == ("big", "gpt", "legal", "small")


def test_a_rule_without_pools_takes_those_that_serve_its_model() -> None:
    served = [spec(n, pool=f"p{n}", models=(name,)) for n, name in enumerate(("big", "small"))]
    models = ModelMap(parse({"models": {"small": {"aliases": ["s"]}}}), served)
    assert models.resolve("s", session="", request_id="") == ModelSide("p1", "small", "small")


def test_without_rules_the_workers_say_what_they_serve() -> None:
    served = [
        spec(0, pool="p", models=("a",), adapters=("lora",)),
        spec(1, pool="q", models=("b",)),
        spec(2, pool="q", models=("a",)),
    ]
    models = ModelMap(parse({}), served)
    assert models.known == ("a", "b", "lora")
    assert models.resolve("b", session="", request_id="").pool == "q"
    side = models.resolve("lora", session="", request_id="")
    assert side == ModelSide("p", "a", "lora", "lora")
    any_model = ModelMap(parse({}), [spec(0, pool="p", models=())])
    assert any_model.resolve("what", session="", request_id="").pool == "p"


def test_an_adapter_goes_where_it_runs_or_is_listed() -> None:
    core = core_of(
        spec(0, pool="stable", models=("big", "big-v2"), adapters=("legal",)),
        spec(1, pool="stable", models=("big", "big-v2"), adapters=("legal",)),
        spec(2, pool="stable", models=("big", "big-v2")),
        policy=parse({"models": {"big": {"pools": [{"pool": "stable"}], "adapters": ["legal"]}}}),
    )
    first = routed(arrive(core, request("r", model="legal")))
    assert first.worker in ("w0", "w1")
    assert (first.model, first.draft.plain.filtered) == ("legal", {"w2": "adapter"})
    # w0 lists it, and runs none at the moment; w2 runs it, and does not list it.
    core.step(Scraped("w0", LoadSample(waiting=0, running=0, adapters=()), 0), 1)
    core.step(Scraped("w2", LoadSample(waiting=0, running=0, adapters=("legal",)), 0), 1)
    # Another verdict on its keys says nothing about the adapters that run.
    core.step(Joined(spec(0, pool="stable", models=("big", "big-v2"), adapters=("legal",))), 1)
    second = routed(arrive(core, request("s", model="legal"))).draft.receipt()
    assert (second.features["warm"], second.filtered) == ([0, 1, 1], {})
    assert second.terms["cold"] == [ADAPTER_S, 0, 0]


@pytest.mark.parametrize(
    ("policy", "models", "sole"),
    [
        ({}, ("a",), "a"),
        ({}, ("a", "b"), "a"),
        ({}, (), ""),
        ({"models": {"a": {"aliases": ["x"], "adapters": ["y"]}}}, ("a", "b"), "a"),
        ({"models": {"a": {}, "b": {}}}, ("a",), ""),
    ],
)
def test_a_request_without_a_model_is_for_the_only_one(
    policy: dict[str, object], models: tuple[str, ...], sole: str
) -> None:
    found = ModelMap(parse(policy), [spec(0, models=models)])
    assert found.sole == sole
    if sole:
        assert found.resolve("", session="", request_id="").body_model == "a"


def test_names_that_nobody_lists_go_to_engines_that_take_any() -> None:
    core = core_of(
        spec(0, models=("a",)),
        spec(1, pool="other", models=("b",), takes_any_model=True),
        spec(2, pool="other", models=("c",)),
    )
    for name, worker in (("a", "w0"), ("b", "w1"), ("c", "w2"), ("b:adapter", "w1"), ("", "w1")):
        sent = routed(arrive(core, request(f"for {name}", model=name)))
        assert (sent.worker, sent.model) == (worker, name)


def test_a_request_without_a_model_is_400_where_engines_list_others() -> None:
    core = core_of(spec(0, models=("a",)), spec(1, models=("a", "b")))
    answer = rejected(arrive(core, request("r", model="")))
    assert (answer.status, answer.reason) == (400, "rejected-model-missing")
    assert answer.known_models == ("a", "b")
    assert core.take_drafts() == []
    assert routed(arrive(core, request("s", model="a"))).worker == "w0"
    # Names of one model: each engine would take the request, if it were alone.
    alike = core_of(*(spec(n, models=("a", "b"), adapters=("lora",)) for n in range(2)))
    assert routed(arrive(alike, request("r", model=""))).worker in ("w0", "w1")
