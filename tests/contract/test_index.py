"""What every `IndexStore` promises, run by each of them. Add one to `MAKERS`."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
from collections.abc import Callable, Iterator

import pytest

from kvstore.index.feed import (
    ASK_AGAIN_MS,
    FORGET_MS,
    OUT_MS,
    PLACES_MAX,
    STALE_MS,
    ConnectRefused,
    Event,
    Holder,
    Trust,
    Verdict,
)
from kvstore.index.holdings import Holdings
from kvstore.index.index import Answer, Index, Match
from kvstore.ports import IndexStore
from kvstore.stores.address import store_config
from kvstore.stores.connection import Deadlines
from kvstore.stores.redis import RedisStore
from kvstore.types import SpaceId, Tier
from kvstore.wire.feed import Left
from kvstore.wire.load import Load
from tests.integration.node.conftest import eventually
from tests.kit.index_check import check
from tests.kit.programs import need
from tests.kit.redis_process import PROGRAM, RedisProcess
from tests.unit.index.model import Model
from tests.unit.index.words import (
    NODE,
    SPACE,
    beat,
    closed,
    delta,
    hello,
    keys,
    part,
    removed,
    served,
    stored,
)

pytestmark = pytest.mark.slow

NOW = 10_000
A = Holder(NODE)
PATIENCE_S = 90.0
Make = Callable[..., IndexStore]
Server = RedisProcess | None  # not installed: other stores need none


class Asked:
    """A store, asked from a thread without a loop."""

    def __init__(self, store: IndexStore, runner: asyncio.Runner) -> None:
        self.store = store
        self._run = runner.run

    def hear(self, event: Event, now_ms: int = NOW) -> Verdict:
        return self._run(self.store.hear(event, now_ms))

    def match(self, *numbers: int, tenant: str = "t", now_ms: int = NOW) -> Answer:
        return self._run(self.store.match(tenant, SPACE, keys(*numbers), now_ms))

    def tick(self, now_ms: int = NOW) -> None:
        self._run(self.store.tick(now_ms))

    def lengths(self, *numbers: int, tenant: str = "t", now_ms: int = NOW) -> dict[Holder, int]:
        """Blocks by holder, in any tier."""
        matches = self.match(*numbers, tenant=tenant, now_ms=now_ms).matches
        found = {match.holder: match.file_blocks for match in matches}
        assert len(found) == len(matches), "a holder is there twice"
        return found

    def trust(self, now_ms: int) -> Trust | None:
        """Of the one holder of block 1; None: it is in no answer."""
        matches = self.match(1, now_ms=now_ms).matches
        assert len(matches) <= 1
        return matches[0].trust if matches else None

    def entry_count(self) -> int:
        self.tick()
        return self.store.statistics().entry_count


def _local(_: Server, *, entries: int, slots: int, nodes: int) -> IndexStore:
    flat = Holdings(entries, slot_count_max=slots, is_native=False)
    return Index(flat, node_count_max=nodes, now_ms=0)


def _redis(redis: Server, *, entries: int, slots: int, nodes: int) -> IndexStore:
    need(PROGRAM)
    assert redis is not None
    return RedisStore(
        store_config(redis.url, password_file=None, ca=None),
        entry_count_max=entries,
        slot_count_max=slots,
        node_count_max=nodes,
        deadlines=Deadlines(PATIENCE_S, PATIENCE_S),
    )


MAKERS: dict[str, Make] = {"local": _local, "redis": _redis}


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    start, folder = RedisProcess.start, tmp_path_factory.mktemp("redis")
    with start(folder) if shutil.which(PROGRAM) else contextlib.nullcontext() as process:
        yield process


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest, redis: Server) -> Iterator[Callable[..., Asked]]:
    """Makes the one store of a test, empty."""
    if redis is not None:
        redis.cli("flushall")
    made = []
    with asyncio.Runner() as runner:

        def new(*, entries: int = 1000, slots: int = 100, nodes: int = 16) -> Asked:
            asked = Asked(
                MAKERS[request.param](redis, entries=entries, slots=slots, nodes=nodes), runner
            )
            made.append(asked)
            asked.tick(0)
            assert asked.store.trouble == ""
            return asked

        yield new
        for asked in made:
            if isinstance(asked.store, Index):
                check(asked.store)
            runner.run(asked.store.close())


@pytest.fixture
def told(make: Callable[..., Asked]) -> Callable[..., Asked]:
    """A store to which node a told these, as its delta 1."""

    def tell(*numbers: int, **limits: int) -> Asked:
        asked = make(**limits)
        assert asked.hear(hello()) is Verdict.GO_ON
        assert asked.hear(delta(1, stored(*numbers))) is Verdict.GO_ON
        return asked

    return tell


def test_an_answer_has_all_holders_with_their_lengths_by_tier(told: Callable[..., Asked]) -> None:
    asked = told()
    changes = [stored(1, tier=Tier.HBM, engine="e"), stored(1, 2), stored(3, tier=Tier.FILE)]
    assert asked.hear(delta(2, *changes)) is Verdict.GO_ON
    asked.hear(hello(node="b"))
    asked.hear(delta(1, stored(1), node="b"))
    answer = asked.match(1, 2, 3, 4)
    assert answer.trust is Trust.EXACT
    assert sorted(answer.matches, key=lambda m: (m.holder.node, m.holder.engine)) == [
        Match(A, 0, 2, 3, Trust.EXACT),
        Match(Holder(NODE, "e"), 1, 1, 1, Trust.EXACT),
        Match(Holder("b"), 0, 1, 1, Trust.EXACT),
    ]
    assert asked.match(4, 1) == asked.match() == Answer(Trust.EXACT, [])


def test_engines_are_those_that_the_node_named_last(told: Callable[..., Asked]) -> None:
    asked = told(1)

    def engines() -> list[str]:
        asked.tick()
        (member,) = asked.store.members(NOW)
        return [each.engine for each in member.engines]

    assert engines() == []
    assert asked.hear(served("e", "f")) is Verdict.GO_ON
    assert engines() == ["e", "f"]
    assert asked.hear(served("g")) is Verdict.GO_ON
    assert asked.hear(served("late", stream=0)) is Verdict.CLOSE
    assert engines() == ["g"]
    assert asked.lengths(1) == {A: 1}
    asked.hear(hello(stream=2, sequence=1))
    assert engines() == ["g"]
    asked.hear(hello(incarnation=2))
    assert engines() == []


def test_engines_go_with_their_node(told: Callable[..., Asked]) -> None:
    asked = told(1)
    asked.hear(served("e"))
    asked.hear(closed())
    for _ in range(2):  # a shared store forgets in one, and shows it in the next
        asked.tick(NOW + FORGET_MS)
    assert asked.store.members(NOW + FORGET_MS) == []


def test_tenants_and_spaces_do_not_see_each_other(told: Callable[..., Asked]) -> None:
    asked = told(1)
    assert asked.match(1, tenant="u") == Answer(Trust.EXACT, [])
    asked.hear(delta(2, stored(1, 2, tenant="u")))
    assert asked.lengths(1, 2) == {A: 1}
    assert asked.lengths(1, 2, tenant="u") == {A: 2}


def test_stores_and_removals_say_what_is_there_now(told: Callable[..., Asked]) -> None:
    asked = told(1, 2, 2, 3)
    assert asked.entry_count() == 3
    asked.hear(delta(2, stored(2, tier=Tier.FILE), removed(2), removed(9)))
    assert asked.match(1, 2, 3).matches == [Match(A, 0, 1, 3, Trust.EXACT)]
    asked.hear(delta(3, removed(2, tier=Tier.FILE), removed(2)))
    assert asked.match(1, 2, 3).matches == [Match(A, 0, 1, 1, Trust.EXACT)]
    assert asked.entry_count() == 2
    asked.hear(delta(4, removed(1), stored(2, tier=Tier.HBM)))
    assert asked.match(1, 2).matches == []
    assert asked.match(2, 3).matches == [Match(A, 1, 2, 2, Trust.EXACT)]


def test_words_twice_or_out_of_order_change_nothing_or_ask(told: Callable[..., Asked]) -> None:
    asked = told(1)
    assert asked.hear(delta(2, removed(1))) is Verdict.GO_ON
    assert asked.hear(delta(1, stored(1))) is Verdict.GO_ON
    assert asked.lengths(1) == {}
    assert asked.hear(delta(4, stored(1))) is Verdict.ASK
    assert asked.trust(NOW) is Trust.CATCHING_UP
    assert asked.match(2).trust is Trust.CATCHING_UP


@pytest.mark.parametrize("seed", range(4))
def test_it_says_what_dictionaries_say(told: Callable[..., Asked], seed: int) -> None:
    """Prompts of more blocks than one look of a script, on nodes that have most of them."""
    chance = random.Random(seed)
    asked, model = told(entries=10_000), Model()
    names = [NODE, *"bcdef"]
    for slot, name in enumerate(names):
        if slot:
            asked.hear(hello(node=name))
        model.open(slot, "t", SPACE, is_hidden=False)
    for sequence in range(2, 9):
        for slot, name in enumerate(names):
            tier = chance.choice(list(Tier))
            begin, end = sorted(chance.choices(range(301), k=2))
            begin = chance.choice([0, begin])
            off = chance.sample(range(300), 3)
            told_, lost = stored(*range(begin, end), tier=tier), removed(*off, tier=tier)
            asked.hear(delta(sequence, told_, lost, node=name))
            model.stored(slot, tier, told_.keys)
            model.removed(slot, tier, lost.keys)
    for length in (1, 127, 128, 129, 300):
        numbers = range(length)
        wanted = model.match("t", SPACE, keys(*numbers))
        found = {
            m.holder.node: (m.hbm_blocks, m.dram_blocks, m.file_blocks)
            for m in asked.match(*numbers).matches
        }
        assert found == {names[slot]: lengths for slot, lengths in wanted.items()}
    assert asked.entry_count() == model.entry_count()


def test_what_a_node_does_is_known_until_its_process_is_another(told: Callable[..., Asked]) -> None:
    asked = told(1)

    def load() -> Load | None:
        (member,) = asked.store.members(NOW)
        return member.load

    assert load() is None
    asked.hear(beat(1, load=Load(at_ms=5, slots_quarantined=2**63, replicas_reached=7)))
    assert load() == Load(at_ms=5, slots_quarantined=2**63, replicas_reached=7)
    asked.hear(beat(1))
    asked.hear(delta(2, stored(2)))
    asked.tick()
    assert load() == Load(at_ms=5, slots_quarantined=2**63, replicas_reached=7)
    asked.hear(hello(incarnation=2))
    assert load() is None


def test_a_young_replica_says_that_more_may_be_there(make: Callable[..., Asked]) -> None:
    asked = make()
    asked.hear(hello(), 0)
    asked.hear(delta(1, stored(1)), 0)
    asked.hear(beat(1), OUT_MS - 1)
    assert asked.trust(OUT_MS - 1) is Trust.EXACT
    assert asked.match(1, now_ms=OUT_MS - 1).trust is Trust.CATCHING_UP
    asked.hear(beat(1), OUT_MS)
    assert asked.match(1, now_ms=OUT_MS).trust is Trust.EXACT


def test_silence_makes_stale_then_out_then_forgotten(told: Callable[..., Asked]) -> None:
    asked = told(1)
    assert asked.trust(NOW + STALE_MS - 1) is Trust.EXACT
    assert asked.trust(NOW + STALE_MS) is Trust.STALE
    assert asked.trust(NOW + OUT_MS) is None
    assert asked.hear(beat(1), NOW + OUT_MS) is Verdict.GO_ON
    assert asked.trust(NOW + OUT_MS) is Trust.EXACT
    lost = NOW + OUT_MS + FORGET_MS
    asked.tick(lost - 1)
    (member,) = asked.store.members(lost - 1)
    assert (member.node, member.trust, member.address) == (NODE, None, f"{NODE}:1")

    def is_forgotten() -> bool:
        asked.tick(lost)
        return not asked.store.members(lost) and asked.store.statistics().entry_count == 0

    assert eventually(is_forgotten, timeout_s=PATIENCE_S)
    assert asked.store.members(lost) == []
    assert asked.hear(beat(1), lost) is Verdict.CLOSE


def test_a_broken_stream_is_stale_at_once_and_whole_when_dialled_again(
    told: Callable[..., Asked],
) -> None:
    asked = told(1)
    asked.hear(closed(), NOW + 1)
    assert asked.trust(NOW + 1) is Trust.STALE
    assert asked.hear(beat(1), NOW + 1) is Verdict.CLOSE
    assert asked.hear(hello(stream=2, sequence=1), NOW + 2) is Verdict.GO_ON
    assert asked.trust(NOW + 2) is Trust.EXACT
    for older_or_same in (1, 2):
        again = hello(stream=older_or_same, sequence=1)
        assert asked.hear(again, NOW + 3) is Verdict.CLOSE
    assert asked.hear(closed(stream=1), NOW + 3) is Verdict.CLOSE
    assert asked.trust(NOW + 3) is Trust.EXACT


def test_a_refused_connection_is_out_at_once_until_the_node_speaks(
    told: Callable[..., Asked],
) -> None:
    asked = told(1)
    asked.hear(ConnectRefused(NODE), NOW + 1)
    assert asked.trust(NOW + 1) is None
    asked.tick(NOW + 1)
    assert asked.trust(NOW + 1) is None
    asked.hear(beat(1), NOW + 2)
    assert asked.trust(NOW + 2) is Trust.EXACT
    assert asked.hear(ConnectRefused("nobody")) is Verdict.CLOSE


def test_a_restart_at_the_same_address_voids_the_past(told: Callable[..., Asked]) -> None:
    asked = told(1, 2)
    assert asked.hear(hello(incarnation=2, sequence=7)) is Verdict.ASK
    assert asked.trust(NOW) is None
    assert asked.hear(hello(incarnation=1, stream=5, sequence=1)) is Verdict.CLOSE
    assert asked.hear(delta(8, stored(2), incarnation=2)) is Verdict.GO_ON
    assert asked.match(2) == Answer(Trust.CATCHING_UP, [Match(A, 0, 1, 1, Trust.CATCHING_UP)])
    assert eventually(lambda: asked.entry_count() == 1, timeout_s=PATIENCE_S)


def test_a_snapshot_replaces_all_at_its_end(told: Callable[..., Asked]) -> None:
    asked = told(1, 2, 3)
    assert asked.hear(delta(3, stored(4))) is Verdict.ASK
    asked.hear(part(3, 0, stored(1, 2)))
    assert asked.lengths(1, 2, 3) == {A: 3}
    asked.hear(delta(4, removed(2), stored(5)))
    assert asked.lengths(1, 2, 3) == {A: 1}
    assert asked.hear(part(4, 1, is_last=True)) is Verdict.GO_ON
    assert asked.trust(NOW) is Trust.EXACT
    assert [bool(asked.lengths(n)) for n in (1, 2, 3, 4, 5)] == [1, 0, 0, 0, 1]


def test_a_snapshot_that_does_not_go_on_is_asked_for_again(told: Callable[..., Asked]) -> None:
    asked = told(1)
    assert asked.hear(beat(2)) is Verdict.ASK
    assert asked.hear(beat(2), NOW + ASK_AGAIN_MS - 1) is Verdict.GO_ON
    later = NOW + ASK_AGAIN_MS
    assert asked.hear(beat(2), later) is Verdict.ASK
    asked.hear(part(2, 0, stored(1)), later)
    assert asked.hear(beat(2), later + ASK_AGAIN_MS - 1) is Verdict.GO_ON
    assert asked.hear(beat(2), later + ASK_AGAIN_MS) is Verdict.ASK


def test_left_takes_what_it_names(told: Callable[..., Asked]) -> None:
    asked = told(1)
    hbm = [stored(1, tier=Tier.HBM, engine=engine) for engine in ("e", "f")]
    asked.hear(delta(2, *hbm, stored(1, tenant="u")))
    asked.hear(delta(3, Left("e")))
    assert asked.lengths(1) == {A: 1, Holder(NODE, "f"): 1}
    asked.hear(delta(4, Left(""), stored(2)))
    assert asked.lengths(1) == {Holder(NODE, "f"): 1}
    assert asked.lengths(2) == {A: 1}
    assert asked.lengths(1, tenant="u") == {}


def test_more_than_all_of_it_keeps_the_beginning_and_says_so(told: Callable[..., Asked]) -> None:
    asked = told(*range(25), entries=10, slots=8)
    assert asked.lengths(*range(25)) == {A: 10}
    assert asked.entry_count() == 10
    (match,) = asked.match(0).matches
    assert match.trust is Trust.CATCHING_UP


def test_full_gives_up_what_is_old_for_what_is_new(told: Callable[..., Asked]) -> None:
    asked = told(*range(10), entries=10, slots=8)
    sequences = iter(range(2, 1_000_000))

    def is_there() -> bool:
        asked.hear(delta(next(sequences), stored(20, 21)))
        assert asked.entry_count() <= 10
        return asked.lengths(20, 21) == {A: 2}

    assert eventually(is_there, timeout_s=PATIENCE_S)
    (match,) = asked.match(20).matches
    assert match.trust is Trust.CATCHING_UP
    assert asked.store.statistics().evicted_count >= 2


def test_who_is_in_no_answer_because_it_found_no_room_is_missed(told: Callable[..., Asked]) -> None:
    asked = told(*range(5), entries=10, slots=8)
    asked.hear(hello(node="b"))
    asked.hear(delta(1, stored(*range(100, 110)), node="b"))
    answers = {n: asked.match(n) for n in (*range(5), *range(100, 110))}
    missed = [n for n, answer in answers.items() if not answer.matches]
    assert len(missed) == 5
    assert {answer.trust for answer in answers.values()} == {Trust.CATCHING_UP}
    assert asked.match(0, tenant="u") == Answer(Trust.EXACT, [])
    # Until its next snapshot.
    node = NODE if 0 in missed else "b"
    sequence = 5
    assert asked.hear(beat(sequence, node=node)) is Verdict.ASK
    asked.hear(part(sequence, 0, is_last=True, node=node))
    assert asked.match(missed[0]) == Answer(Trust.EXACT, [])


def test_without_slots_the_node_is_catching_up_until_a_snapshot_fits(
    told: Callable[..., Asked],
) -> None:
    asked = told(1, slots=8)
    asked.hear(delta(2, *(stored(1, tenant=f"t{i}", engine=f"e{i}") for i in range(8))))
    assert asked.lengths(1, tenant="t7") == {}
    assert asked.trust(NOW) is Trust.CATCHING_UP
    asked.hear(delta(3, *(Left(f"e{i}") for i in range(8))))
    assert asked.hear(beat(4)) is Verdict.ASK
    asked.hear(part(4, 0, stored(1), is_last=True))
    assert asked.trust(NOW) is Trust.EXACT


def test_a_node_does_not_take_the_slots_of_others(make: Callable[..., Asked]) -> None:
    slots = 3 * PLACES_MAX
    asked = make(entries=10_000, slots=slots)
    many = [stored(1, engine=str(n)) for n in range(slots + 1)]
    asked.hear(hello())
    asked.hear(delta(1, *many))
    assert asked.hear(beat(3)) is Verdict.ASK
    asked.hear(part(3, 0, *many))
    asked.hear(hello(node="b"))
    assert asked.hear(beat(1, node="b")) is Verdict.ASK
    asked.hear(part(1, 0, stored(7), is_last=True, node="b"))
    (match,) = asked.match(7).matches
    assert match == Match(Holder("b"), 0, 1, 1, Trust.EXACT)
    asked.hear(part(3, 1, is_last=True))
    matches = asked.match(1).matches
    assert len(matches) == PLACES_MAX
    assert {match.trust for match in matches} == {Trust.CATCHING_UP}


def test_an_engine_that_leaves_while_a_snapshot_comes_is_not_brought_back(
    told: Callable[..., Asked],
) -> None:
    asked = told(1)
    asked.hear(delta(2, *(stored(1, tier=Tier.HBM, engine=name) for name in "ef")))
    assert asked.hear(beat(3)) is Verdict.ASK
    asked.hear(part(3, 0, *(stored(1, tier=Tier.HBM, engine=name) for name in "efg")))
    asked.hear(delta(4, Left("f"), Left("g"), Left("h")))
    assert asked.lengths(1) == {A: 1, Holder(NODE, "e"): 1}
    asked.hear(part(4, 1, stored(1), is_last=True))
    assert asked.lengths(1) == {A: 1, Holder(NODE, "e"): 1}
    asked.hear(delta(5, Left("e")))
    assert asked.lengths(1) == {A: 1}


def test_nodes_are_bounded_and_begin_with_hello(make: Callable[..., Asked]) -> None:
    asked = make(nodes=1)
    assert asked.hear(beat(0)) is Verdict.CLOSE
    assert asked.hear(hello()) is Verdict.GO_ON
    assert asked.hear(hello(node="b")) is Verdict.CLOSE


def test_what_are_no_keys_is_told(told: Callable[..., Asked]) -> None:
    asked = told(1)
    with pytest.raises(ValueError, match="33 bytes are no keys of 32 bytes each"):
        asked._run(asked.store.match("t", SpaceId(bytes(32)), bytes(33), NOW))
