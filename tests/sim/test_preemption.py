"""A preempted request loads its own blocks: it computes again at most a block and what was not
sealed yet. Without faults, so that nothing else can be the reason."""

from __future__ import annotations

import pytest

from tests.sim.world.engine import SimEngine
from tests.sim.world.groups import BLOCK_TOKENS
from tests.sim.world.parts import Knobs
from tests.sim.world.play import World
from tests.sim.world.requests import SimRequest


def quiet_world(seed: int) -> World:
    """One node, nothing goes wrong; everything fits."""
    world = World(seed, knobs=Knobs(), faults=())
    world.engines = [SimEngine(world.machines[0], "e", space=world.spaces[0], blocks=64)]
    return world


def turn(world: World, engine: SimEngine) -> None:
    """Everybody moves a little; copies and sockets keep up with the engine."""
    world.now_ns += 1_000_000
    engine.step()
    for _ in range(20):
        engine.copy_step()
    engine.poll_ranks()
    engine.machine.node_step()
    engine.poll_ranks()


@pytest.mark.parametrize("seed", range(20))
def test_a_resumed_request_computes_at_most_one_block_and_the_unsealed_tail(seed: int) -> None:
    world = quiet_world(seed)
    (engine,) = world.engines
    for _ in range(20):
        turn(world, engine)
    assert engine.core.attachment.is_open
    keys = next(chain for chain in world.chains if len(chain) >= 20)
    tokens = world.random.randrange(5, 9) * BLOCK_TOKENS + world.random.randrange(BLOCK_TOKENS)
    request = SimRequest("r", keys, tokens=tokens, decode_tokens=5 * BLOCK_TOKENS)
    engine.add(request)
    resumptions = 0
    for number in range(600):
        turn(world, engine)
        if engine.finished_count:
            break
        if request in engine.running and number % 40 == 39 and request.computed < request.tokens:
            before, loaded = request.computed, engine.loaded_blocks
            engine.preempt(request)
            while request not in engine.running:
                turn(world, engine)
            again = before - (engine.loaded_blocks - loaded) * BLOCK_TOKENS
            assert 0 <= again <= BLOCK_TOKENS, (before, again)
            resumptions += 1
    assert engine.finished_count == 1
    assert resumptions >= 1
