"""Names of models: aliases, adapters, pools with weights, sessions that stay."""

from __future__ import annotations

import pytest

from kvstore.routing.models import ModelMap, ModelUnknown
from kvstore.routing.policy import parse
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


def test_without_rules_the_workers_say_what_they_serve() -> None:
    models = ModelMap(parse({}), [("a", "p"), ("b", "q"), ("a", "q")])
    assert models.known == ("a", "b")
    assert models.resolve("b", session="", request_id="").pool == "q"
    any_model = ModelMap(parse({}), [("", "p")])
    assert any_model.resolve("what", session="", request_id="").pool == "p"


def test_an_unknown_model_is_404_with_the_list() -> None:
    core = core_of(spec(0, pool="small", models=("small",)), policy=POLICY)
    answer = rejected(arrive(core, request("r", model="none")))
    assert (answer.status, answer.known_models) == (404, ("big", "gpt", "legal", "small"))
    assert not core.open


def test_an_adapter_goes_where_it_is_or_has_room() -> None:
    core = core_of(
        spec(0, pool="stable", models=("big", "big-v2"), adapters=("legal",)),
        spec(1, pool="stable", models=("big", "big-v2"), adapters_max=2),
        spec(2, pool="stable", models=("big", "big-v2")),
        policy=parse({"models": {"big": {"pools": [{"pool": "stable"}], "adapters": ["legal"]}}}),
    )
    first = routed(arrive(core, request("r", model="legal")))
    assert (first.worker, first.model) == ("w0", "legal")
    assert first.receipt.filtered == {"w2": "adapter"}
