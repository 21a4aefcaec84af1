"""Threads that take turns: the seed decides whose, virtual time how long, and death is at once."""

from __future__ import annotations

import random

import pytest

from tests.sim.world.threads import SimCondition, Threads


class World:
    def __init__(self, seed: int = 1) -> None:
        self.now_ns = 0
        self.threads = Threads(random.Random(seed), lambda: self.now_ns, self.pass_time)
        self.said: list[str] = []

    def pass_time(self) -> None:
        self.now_ns += 10**6

    def speak(self, word: str) -> None:
        for _ in range(5):
            self.said.append(word)
            self.threads.park(lambda: True)


@pytest.fixture
def world() -> World:
    return World()


def spoken(seed: int) -> str:
    world = World(seed)
    threads = [world.threads.Thread(world.speak, (word,)) for word in "abc"]
    world.threads.start()
    while world.threads.run_one() or any(thread.is_alive() for thread in threads):
        pass
    return "".join(world.said)


def test_the_seed_decides_whose_turn_it_is() -> None:
    assert sorted(spoken(1)) == sorted("aaaaabbbbbccccc")
    assert spoken(1) == spoken(1)
    assert len({spoken(seed) for seed in range(8)}) > 4


def test_who_waits_for_a_condition_is_woken_by_it(world: World) -> None:
    condition = world.threads.Condition()
    things: list[str] = []

    def take() -> None:
        with condition:
            condition.wait_for(lambda: bool(things))
            world.said.append(things.pop())
            condition.wait()
            world.said.append("woken")

    thread = world.threads.Thread(take)
    world.threads.start()
    assert world.threads.run_one()
    assert not world.threads.run_one()
    with condition:
        things.append("thing")
    assert world.threads.run_one()
    assert not world.threads.run_one()
    with condition:
        condition.notify_all()
    thread.join()
    assert world.said == ["thing", "woken"]


def test_an_event_is_waited_for_in_virtual_time(world: World) -> None:
    event = world.threads.Event()
    thread = world.threads.Thread(lambda: world.said.append(str(event.wait(0.05))))
    world.threads.start()
    thread.join()
    assert (world.said, world.now_ns) == (["False"], 50 * 10**6)


def test_a_join_has_an_end(world: World) -> None:
    thread = world.threads.Thread(lambda: world.threads.park(lambda: False))
    world.threads.start()
    thread.join(0.02)
    assert (thread.is_alive(), world.now_ns) == (True, 20 * 10**6)
    world.threads.kill()
    assert not thread.is_alive()


def test_the_killed_do_nothing_more(world: World) -> None:
    def speak() -> None:
        try:
            world.threads.park(lambda: False)
            world.said.append("never")
        finally:
            world.threads.park(lambda: True)
            world.said.append("never, either")

    thread = world.threads.Thread(speak)
    world.threads.start()
    world.threads.run_one()
    world.threads.kill()
    assert (world.said, thread.is_alive()) == ([], False)


def hold_a_lock(world: World, condition: SimCondition) -> None:
    with condition:
        world.threads.park(lambda: True)


def test_nobody_waits_for_the_disk_with_a_lock_held(world: World) -> None:
    world.threads.Thread(hold_a_lock, (world, world.threads.Condition()))
    world.threads.start()
    with pytest.raises(AssertionError, match="while it holds a lock"):
        world.threads.run_one()
    world.threads.kill()
