"""`/v1/models`: names that clients may use, each with the longest context of its engines."""

from __future__ import annotations

import json
from typing import Any, cast

from aiohttp import web

from kvstore.config.router import WorkerAddress
from kvstore.router.engines.workers import Worker, WorkerAdapter
from kvstore.router.front.answers import models_answer
from kvstore.routing.policy import RoutingPolicy, parse


def worker(*models: str, adapters: str = "", **contexts: Any) -> Worker:
    made = Worker(WorkerAddress(name="w", url="http://h", models=models))
    made.contexts = contexts
    made.adapters = {name: WorkerAdapter(models[0], "/path") for name in adapters}
    return made


def asked(path: str, *workers: Worker, policy: dict[str, Any] | None = None) -> tuple[int, Any]:
    rules = parse(policy) if policy else RoutingPolicy()
    answer: web.Response = models_answer(path, rules, workers, 7)
    assert answer.headers["Server"] == "kvstore"
    return answer.status, json.loads(cast("bytes", answer.body))


def lengths(page: Any) -> dict[str, int | None]:
    assert page["object"] == "list"
    for row in page["data"]:
        assert (row["object"], row["created"], row["owned_by"]) == ("model", 7, "kvstore")
    return {row["id"]: row.get("max_model_len") for row in page["data"]}


def test_without_a_policy_what_engines_list_counts_and_the_longest_context() -> None:
    crew = [worker("m", "n", adapters="z", m=65536, z=65536), worker("m", m=4096), worker()]
    status, page = asked("/v1/models", *crew)
    assert (status, lengths(page)) == (200, {"m": 65536, "n": None, "z": 65536})
    assert asked("/v1/models") == (200, {"object": "list", "data": []})


def test_names_of_the_policy_hide_those_of_engines_and_have_their_contexts() -> None:
    rule = {
        "aliases": ["alias"],
        "adapters": ["lora"],
        "pools": [{"pool": "a", "served": "m"}, {"pool": "b", "served": "n"}],
    }
    policy = {"models": {"public": rule, "other": {}}}
    _, page = asked("/v1/models", worker("m", "secret", m=100, n=300, secret=9), policy=policy)
    assert lengths(page) == {"alias": 300, "lora": 300, "public": 300, "other": None}


def test_one_model_by_its_path() -> None:
    contexts: dict[str, Any] = {"org/model": 10}
    crew = [worker("org/model", **contexts)]
    status, row = asked("/v1/models/org/model", *crew)
    assert (status, row["id"], row["max_model_len"]) == (200, "org/model", 10)
    for path in ("/v1/models/", "/v1/models/org", "/v1/models/org/model/", "/v1/modelsorg/model"):
        status, page = asked(path, *crew)
        assert (status, page["error"]["code"]) == (404, "model_not_found")


def test_a_hostile_name_is_a_name_in_json() -> None:
    name = '"}\r\nX: 1</script>\x00é'
    status, page = asked(f"/v1/models/{name}")
    assert status == 404
    assert repr(name) in page["error"]["message"]
    assert asked(f"/v1/models/{name}", worker(name))[1]["id"] == name
