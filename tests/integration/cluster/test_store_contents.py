"""A store with records of no replica is unreachable until that is mended, and says why."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.index.feed import FORGET_MS, Trust
from kvstore.index.index import Answer
from tests.integration.cluster.test_store import NOW, Lab
from tests.kit.redis_process import RedisProcess
from tests.unit.index.words import NODE, delta, hello, stored

pytestmark = pytest.mark.slow

NONSENSE = {
    "no number": (
        ["hset", "{P}counts", "entries", "many"],
        "entries in the hash counts is b'many'",
    ),
    "too large a number": (["hset", "{P}counts", "rows", "9" * 99], "rows in the hash counts is"),
    "no slot number": (["set", "{P}ids", str(1 << 40)], "the key ids is 1099511627776"),
    "no body": (["hset", "{P}n:evil", "v", "0.1"], "the record of node 'evil' is none"),
    "no version": (
        ["hset", "{P}n:evil", "v", "x.1", "body", "y"],
        "the record of node 'evil' is none",
    ),
    "another body": (["hset", "{P}n:evil", "v", "0.1", "body", "y"], "for a Body is none"),
    "no name": (["hset", "{P}n:\udcff", "v", "0.1", "body", "y"], "'\\xff', which is no name"),
    "another type": (["rpush", "{P}nodes", "a"], "WRONGTYPE"),
}


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with asyncio.Runner() as runner:
        made = Lab(tmp_path, runner)
        yield made
        made.close()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    with RedisProcess.start(tmp_path) as process:
        yield process


@pytest.mark.parametrize("what", NONSENSE)
def test_a_store_of_contents_that_make_no_sense_is_away_until_they_are_mended(
    lab: Lab, redis: RedisProcess, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    command, reason = NONSENSE[what]
    command = [word.replace("{P}", "kvstore:1:") for word in command]
    one = lab.replica(redis)
    one.hear(hello())
    one.hear(delta(1, stored(1)))
    if what == "another type":
        redis.cli("del", command[1])
    elif command[1].startswith("kvstore:1:n:"):
        redis.cli("sadd", "kvstore:1:nodes", command[1].removeprefix("kvstore:1:n:"))
    redis.cli(*command)
    caplog.clear()
    for _ in range(3):
        one.tick()
        assert "is unreachable: " in one.store.trouble
        assert reason in one.store.trouble
        assert one.match(1) == Answer(Trust.STALE, [])
    assert [r.getMessage().count(reason) for r in caplog.records] == [1], "one line, not one a poll"
    redis.cli("del", command[1])
    one.tick()
    assert one.store.trouble == ""
    assert one.match(1).trust is not Trust.STALE


def test_a_record_that_cannot_be_forgotten_is_one_line_and_not_one_a_poll(
    lab: Lab, redis: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    one = lab.replica(redis)
    one.hear(hello())
    redis.cli("hset", f"kvstore:1:n:{NODE}", "places", "none")
    caplog.clear()
    for _ in range(3):
        one.tick(NOW + FORGET_MS)
        assert "for a KeptSlots is none" in one.store.trouble
    assert len(caplog.records) == 1
    redis.cli("del", f"kvstore:1:n:{NODE}")
    one.tick(NOW + FORGET_MS)
    assert one.store.trouble == ""
