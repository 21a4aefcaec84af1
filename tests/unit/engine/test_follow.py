"""Engines that publish KV events are followed as long as their scheduler is there."""

from __future__ import annotations

import pytest

from kvstore.engine.events import Command, Ended, Exited, Follow, Unfollow
from kvstore.types import ConnectionId, EngineSource
from kvstore.wire.messages import Quiesce, Quiet, SessionOpen
from kvstore.wire.space import fingerprint
from tests.unit.engine.harness import HALVES, Hellos, Node


def follows(commands: list[Command]) -> list[Command]:
    return [command for command in commands if isinstance(command, Follow | Unfollow)]


def test_an_engine_that_publishes_is_followed_from_its_session_to_the_end_of_its_scheduler() -> (
    None
):
    node = Node(follows=True)
    shape = Hellos(shards=HALVES)
    hello = shape.scheduler_hello(events="ipc:///e", events_replay="ipc:///r", data_rank=3)
    ranks = [node.connect(shape.rank_hello(rank)) for rank in range(2)]
    scheduler = node.connect(hello)
    session = node.last(ranks[0], Quiesce).session
    assert follows(node.hear(ranks[0], Quiet(session))) == []
    source = EngineSource(
        engine=shape.name,
        rank=3,
        endpoint="ipc:///e",
        replay_endpoint="ipc:///r",
        tenant=shape.tenant,
        space=fingerprint(shape.space, weights_epoch=shape.epoch),
        hash_seed=shape.space.hash_seed,
        block_tokens=shape.space.block_tokens,
        names_are_keys=True,
    )
    said = Follow(ConnectionId(scheduler), source)
    assert follows(node.hear(ranks[1], Quiet(session))) == [said]
    assert follows(node.step(Ended(ConnectionId(ranks[1])))) == [], "it computes without us"
    over = [Unfollow(ConnectionId(scheduler))]
    assert follows(node.step(Exited(ConnectionId(scheduler)))) == over
    assert follows(node.step(Ended(ConnectionId(scheduler)))) == [], "once"


@pytest.mark.parametrize(("wanted", "events"), [(False, "ipc:///e"), (True, "")])
def test_who_does_not_publish_or_where_nobody_wants_it_is_not_followed(
    wanted: bool, events: str
) -> None:
    node, shape = Node(follows=wanted), Hellos()
    rank = node.connect(shape.rank_hello(0))
    scheduler = node.connect(shape.scheduler_hello(events=events))
    opened = node.hear(rank, Quiet(node.last(rank, Quiesce).session))
    assert node.count(scheduler, SessionOpen) == 1
    assert follows([*opened, *node.step(Ended(ConnectionId(scheduler)))]) == []
