"""Ids of stored responses: every router finds the worker that keeps one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvstore.config.router import WorkerAddress
from kvstore.router.engines.workers import Worker
from kvstore.router.front.answers import (
    PREFIX,
    RESPONSES,
    TAG_DIGITS,
    id_for,
    is_of,
    new_id,
    tag,
    worker_of,
)
from kvstore.router.front.intake import peek
from kvstore.router.front.paths import STORED

PLACES = [("http://10.0.0.1:8000", 0), ("http://10.0.0.2:8000", 0), ("http://10.0.0.2:8000", 1)]


def workers(names: str, **more: Any) -> list[Worker]:
    return [
        Worker(WorkerAddress(name=name, url=url, rank=rank, **more))
        for name, (url, rank) in zip(names, PLACES, strict=True)
    ]


def test_routers_that_name_and_order_engines_otherwise_agree() -> None:
    ours, theirs = workers("abc"), workers("xyz", pool="other", node="n", engine="e")[::-1]
    for worker in ours:
        made = new_id(worker, "")
        assert worker_of(made, ours) is worker
        found = worker_of(made, theirs)
        assert found is not None
        assert (found.url, found.address.rank) == (worker.url, worker.address.rank)


def test_ids_are_new_each_time_and_fit_into_a_path() -> None:
    [worker, *_] = workers("abc")
    made = {new_id(worker, "") for _ in range(100)}
    assert len(made) == 100
    assert {len(each) for each in made} == {len(PREFIX) + 32}, "as long as those of vLLM"
    assert all(STORED.fullmatch(f"/v1/responses/{each}") for each in made)


def test_the_id_of_a_worker_that_has_left_is_nobodys() -> None:
    ours = workers("abc")
    made = new_id(ours[0], "")
    assert worker_of(made, ours[1:]) is None
    assert worker_of(made, []) is None


@pytest.mark.parametrize(
    "wrong",
    ["", PREFIX, "resp", "{tag}", "resp-{tag}00", "RESP_{tag}00", " resp_{tag}", PREFIX + "0" * 32],
)
def test_an_id_without_a_tag_is_nobodys(wrong: str) -> None:
    ours = workers("abc")
    assert worker_of(wrong.format(tag=tag(ours[0])), ours) is None


def test_a_tag_is_compared_as_it_is_written() -> None:
    ours = workers("abc")
    marked = next(each for each in ours if tag(each).upper() != tag(each))
    assert worker_of(PREFIX + tag(marked), ours) is marked
    assert worker_of(PREFIX + tag(marked).upper(), ours) is None
    assert worker_of(PREFIX + tag(marked)[:-1], ours) is None


@given(st.text() | st.binary(max_size=64).map(lambda raw: PREFIX + raw.decode("latin-1")))
def test_no_id_of_a_client_fails(given_id: str) -> None:
    ours = workers("abc")
    found = worker_of(given_id, ours)
    wanted = given_id[len(PREFIX) :][:TAG_DIGITS] if given_id.startswith(PREFIX) else ""
    assert found is next((each for each in ours if tag(each) == wanted), None)


def test_a_response_is_that_of_its_tenant() -> None:
    ours = workers("abc")
    made = new_id(ours[0], "a")
    assert is_of(made, "a", ours)
    assert not is_of(made, "b", ours)
    assert is_of(made, "", ours), "without API keys there is one tenant"
    assert is_of("resp_made_by_an_engine", "b", ours)


def test_an_id_of_the_clients_choice_would_say_no_tenant() -> None:
    worker, chosen = workers("abc")[0], peek(b'{"request_id": "mine"}')
    assert id_for(worker, RESPONSES, chosen, "") == {}
    assert is_of(id_for(worker, RESPONSES, chosen, "a")["request_id"], "a", [worker])


def test_engines_that_do_not_know_the_field_do_not_get_it() -> None:
    assert id_for(workers("abc", kind="openai")[0], RESPONSES, peek(b"{}"), "a") == {}
