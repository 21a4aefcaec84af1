"""Spaces that are switched off: by whom, what that means, and how it ends; and what the scrub of
dram is given to look at, and does with what it found."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvstore.engine import engine as engine_module, trust
from kvstore.engine.events import Clear, Command, SwitchedOff, Tick
from kvstore.engine.trust import NO_PASS, Sealed
from kvstore.engine.why.reasons import Reason
from kvstore.tier_events import Scrubbed, VoidFile
from kvstore.types import SpaceId, Tier
from kvstore.units import NS_PER_MS
from kvstore.wire.messages import Compared, Grant, LeaseReply
from kvstore.wire.record import Scope
from kvstore.wire.space import fingerprint
from tests.unit.engine.disk import SPACE, DiskNode, known
from tests.unit.engine.harness import (
    HALVES,
    SMALL,
    WHOLE,
    Node,
    Peer,
    arrays,
    attached,
    checksum,
    key,
    pairs,
    short,
    space,
)
from tests.unit.engine.mortal import MortalNode
from tests.unit.engine.test_explain import told

OTHER = space("other", layer_bytes=16 << 10)
OTHER_SPACE = fingerprint(OTHER, weights_epoch="")


def compared(
    peer: Peer, lease: int, *diverged: int, blocks: int = 1, session: int = 0
) -> list[Command]:
    """The peer's engine has computed blocks of a lookup."""
    message = Compared(
        session=session or peer.session,
        lease=lease,
        blocks=blocks,
        diverged=np.array(diverged, "<u4").tobytes(),
        error_ppm=1_400_000,
    )
    return peer.node.hear(peer.scheduler, message)


def switched_off() -> tuple[Node, Peer]:
    """Block 1 of lease 7 diverged."""
    node, peer = attached(Node())
    peer.seal(1)
    peer.lease(7, 1)
    compared(peer, 7, 0)
    return node, peer


def off(node: Node) -> list[tuple[str, SpaceId, Tier | None]]:
    return node.engine.spaces_off()


def in_words(commands: list[Command]) -> list[SwitchedOff]:
    return [command for command in commands if isinstance(command, SwitchedOff)]


def test_what_agrees_is_counted() -> None:
    node, peer = attached(Node())
    peer.seal(1, 2)
    peer.lease(7, 1, 2)
    assert in_words(compared(peer, 7, blocks=2)) == []
    assert off(node) == []
    counters = node.engine.counters
    assert (counters.shadow_blocks, counters.shadow_blocks_diverged) == (2, 0)


def test_what_diverges_switches_the_space_off_and_is_told_once() -> None:
    node, peer = attached(Node())
    peer.seal(1, 2)
    peer.lease(7, 1, 2)
    (told,) = in_words(compared(peer, 7, 1, blocks=2))
    assert (told.tenant, told.space, told.tier) == ("t", SPACE, None)
    assert (told.engine, told.blocks, told.diverged, told.error_ppm) == ("e (e)", 2, 1, 1_400_000)
    assert off(node) == [("t", SPACE, None)]
    assert node.blocks() == {}, "nothing is held that nobody may have"
    assert in_words(compared(peer, 7, 1)) == []
    assert peer.lease(8, 1, 2).slots == b""


def test_while_it_is_off_nothing_is_served_stored_or_granted() -> None:
    node, peer = switched_off()
    (place,) = peer.used
    assert node.raised[place[0]] > place[1], "who reads it sees that"
    grants = node.count(peer.scheduler, Grant)
    sealed = peer.seal(*range(2, 2 + len(peer.unused())))
    assert all(node.raised[slot] > generation for slot, generation in sealed)
    assert node.granted() == 0
    node.tick()
    assert node.count(peer.scheduler, Grant) == grants
    reply = peer.lease(8, 2)
    assert (reply.slots, reply.promoting) == (b"", 0)
    assert peer.hint(1, 2) == [False, False]
    assert node.blocks() == {}


def test_clear_of_the_space_ends_it() -> None:
    node, peer = switched_off()
    node.step(Clear(space=OTHER_SPACE, tenant=None))
    assert off(node), "that of another space does not"
    node.step(Clear(space=SPACE, tenant=None))
    assert off(node) == []
    peer.seal(2)
    assert peer.lease(8, 2).slots


def test_no_engine_speaks_for_another_tenant_or_space() -> None:
    node = Node(slots=64)
    victim, stranger = Peer(node, "victim", tenant="v"), Peer(node, "stranger", tenant="t")
    neighbour = Peer(node, "neighbour", tenant="t", space=OTHER)
    victim.seal(1)
    neighbour.seal(1)
    victim.lease(7, 1)
    neighbour.lease(9, 1)
    for lease in (7, 9):
        compared(stranger, lease, 0)
        compared(stranger, lease, 0, session=victim.session)
        compared(stranger, lease, 0, session=neighbour.session)
    assert off(node) == []
    stranger.seal(1)
    stranger.lease(7, 1)
    compared(stranger, 7, 0)
    assert off(node) == [("t", SPACE, None)], "its own"
    assert victim.lease(8, 1).slots
    assert neighbour.lease(10, 1).slots


def test_words_of_an_earlier_session_are_not_about_the_space_of_this_one() -> None:
    """Its weights changed meanwhile."""
    node, peer = attached(Node())
    peer.seal(1)
    peer.lease(7, 1)
    earlier = peer.session
    peer.scheduler = node.connect(peer.scheduler_hello(weights_epoch="new"))
    peer.be_quiet()
    assert peer.session != earlier
    compared(peer, 7, 0, session=earlier)
    assert off(node) == []


@pytest.mark.parametrize(("lease", "block"), [(99, 0), (7, 1), (7, 2**32 - 1)])
def test_words_about_what_was_never_served_are_nothing(lease: int, block: int) -> None:
    node, peer = attached(Node())
    peer.seal(1)
    peer.lease(7, 1)
    compared(peer, lease, block)
    assert off(node) == []


def test_what_came_from_disk_switches_the_disk_off_and_memory_starts_anew() -> None:
    node = DiskNode()
    node.step(known(1, 2))
    peer = Peer(node)
    peer.lease(7, 1, 2)
    node.read_all()
    (told,) = in_words(compared(peer, 7, 0, blocks=2))
    assert told.tier is Tier.FILE
    assert node.blocks() == {}
    assert node.voids == [VoidFile("t", SPACE)]
    peer.seal(1, 2)
    assert node.blocks() == {short(n): "dram" for n in (1, 2)}
    assert node.writes == [], "nothing goes to disk"
    node.step(known(3, at=50))
    assert short(3) not in node.blocks()
    assert peer.lease(8, 1, 2, 3).promoting == 0
    assert node.reads == [], "and nothing comes from there"
    assert len(node.last(peer.scheduler, LeaseReply).slots) == 2 * 4
    assert node.engine.spaces()[0].off == "file"
    peer.lease(9, 1)
    (told,) = in_words(compared(peer, 9, 0))
    assert told.tier is None, "then memory diverged too"
    assert node.engine.spaces()[0].off == "all"


def test_it_is_emptied_a_slice_at_a_time_and_nothing_is_served_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "CLEAR_ROWS_MAX", 2)
    node = DiskNode()
    node.step(known(1, 2, 3, 4, 5))
    peer = Peer(node)
    peer.lease(7, 1)
    node.read_all()
    compared(peer, 7, 0)
    left = [n for n in range(1, 6) if short(n) in node.blocks()]
    assert len(left) == 3
    assert len(node.voids) == 1, "whatever ends the node now, the disk brings nothing back"
    assert peer.lease(8, *left).promoting == 0
    assert peer.hint(*left) == [False] * 3
    assert node.reads == []
    peer.seal(9)
    for _ in range(3):
        node.tick()
    assert node.blocks() == {}
    assert len(node.voids) == 1
    peer.seal(10)
    assert peer.lease(9, 10).slots, "memory is on again, the disk was at fault"


def test_a_process_that_dies_before_all_is_emptied_leaves_none_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "CLEAR_ROWS_MAX", 2)
    node = MortalNode(slots=64)
    peer, neighbour = Peer(node), Peer(node, "neighbour", space=OTHER)
    peer.seal(1, 2, 3, 4, 5)
    neighbour.seal(6)
    peer.lease(7, 5)
    compared(peer, 7, 0)
    assert len(node.blocks()) == 4
    node.restart(node.memory)
    assert node.blocks() == {short(6): "dram"}


def test_what_is_off_is_not_kept_when_its_segment_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moved to the end of the log it would be newer than what makes it void."""
    monkeypatch.setattr(engine_module, "CLEAR_ROWS_MAX", 1)
    node = DiskNode()
    node.step(known(*range(1, 9)))
    peer = Peer(node)
    peer.lease(7, *range(1, 9))
    node.read_all()
    compared(peer, 7, 0)
    assert node.blocks(), "not empty yet"
    assert node.reclaim(*range(1, 9)) == b""


def test_explain_says_that_the_space_is_off() -> None:
    node, peer = switched_off()
    peer.lease(8, 1, 2)
    row = told(node, peer, blocks=2, leases=[8])
    (part,) = node.engine.explain.request(row.number)[1]
    assert (part.blocks, part.reason) == (2, Reason.SWITCHED_OFF)
    (part,) = node.engine.explain.prefix("t", SPACE, key(1))
    assert part.reason is Reason.DIVERGED


def test_the_list_is_bounded_and_a_tenant_pays_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "OFF_MAX", 3)
    node = Node(slots=64)
    for tenant, model in (("v", "a"), ("t", "a"), ("t", "b"), ("t", "c"), ("t", "d")):
        peer = Peer(
            node, f"{tenant}{model}", tenant=tenant, space=space(model, layer_bytes=16 << 10)
        )
        peer.seal(1)
        peer.lease(7, 1)
        compared(peer, 7, 0)
        node.end(peer.scheduler, *peer.ranks)
    assert [tenant for tenant, *_ in off(node)] == ["v", "t", "t"]


# ── the scrub of dram ────────────────────────────────────────────────────────────────────────────


def listed(node: Node) -> list[Sealed]:
    """All looks of a pass."""
    looks = [node.engine.scrubs.sealed(0)]
    while looks[-1].next_word:
        looks.append(node.engine.scrubs.sealed(looks[-1].next_word))
    return looks


def bad(places: Sequence[tuple[int, int]]) -> Scrubbed:
    slots, generations = arrays(places)
    return Scrubbed(Tier.DRAM, len(places), 100, slots=slots, generations=generations)


def test_every_sealed_block_is_listed_with_its_address_and_checksum() -> None:
    node, peer = attached(Node())
    places = dict(zip((1, 2, 3), peer.seal(1, 2, 3), strict=True))
    (look,) = listed(node)
    assert {block.scope for block in look.blocks} == {
        Scope("t", SPACE, WHOLE, SMALL.layer_count * SMALL.kv_head_count * SMALL.head_bytes[0])
    }
    found = {b.key: ((b.slot, b.generation), b.checksum) for b in look.blocks}
    assert found == {key(n): (place, checksum(n)) for n, place in places.items()}


def test_looks_are_short_and_leave_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "BLOCKS_PER_LOOK", 2)
    monkeypatch.setattr(trust, "WORDS_PER_LOOK", 5)
    node = Node()
    one, other = Peer(node, "one"), Peer(node, "other", tenant="u", shards=HALVES)
    one.store(1, 2, 3, 4, 5)
    other.store(1, 2)
    looks = listed(node)
    assert all(len(look.blocks) <= 2 for look in looks)
    found = [(block.scope.tenant, block.key) for look in looks for block in look.blocks]
    expected = [("t", key(n)) for n in (1, 2, 3, 4, 5)] + [("u", key(n)) for n in (1, 1, 2, 2)]
    assert sorted(found) == sorted(expected)


def test_a_bad_copy_is_dropped_and_counted() -> None:
    node, peer = attached(Node())
    one, two = peer.seal(1, 2)
    node.step(bad([two]))
    assert set(node.blocks()) == {short(1)}
    assert node.raised[two[0]] == two[1] + 1, "readers see it"
    row = node.engine.tiers()[0]
    assert (row.scrubbed_blocks, row.scrubbed_bytes, row.scrub_bad) == (1, 100, 1)
    (gone,) = node.engine.explain.prefix("t", SPACE, key(2))
    assert gone.reason is Reason.FAILED_SCRUB
    assert pairs(peer.lease(1, 1)) == [one]


def test_a_slot_that_was_reused_meanwhile_is_nobodys_fault() -> None:
    node, peer = attached(Node())
    (place,) = peer.seal(1)
    node.step(Clear(space=None, tenant=None))
    node.step(bad([place, (1 << 20, 1), (0, 99)]))
    (slot, generation), (other, _) = peer.seal(2, 3)
    node.step(bad([place, (slot, generation + 1), (other, 0)]))
    assert set(node.blocks()) == {short(2), short(3)}
    assert node.engine.tiers()[0].scrub_bad == 0


def test_passes_age_and_what_the_disk_refuses_is_told() -> None:
    node = DiskNode()
    assert [row.scrub_age_ms for row in node.engine.tiers()] == [NO_PASS, NO_PASS]
    node.step(Scrubbed(Tier.FILE, 3, 300, bad_key=bytes(32), pass_ended=True))
    node.now_ns += 5 * NS_PER_MS
    node.step(Tick(file_breakers=("half-open", "open")))
    dram, file = node.engine.tiers()
    assert (file.reads, file.writes) == ("half-open", "open")
    assert (dram.scrub_age_ms, file.scrub_age_ms) == (NO_PASS, 5)
    assert (file.scrubbed_blocks, file.scrubbed_bytes, file.scrub_bad) == (3, 300, 1)


def test_blocks_of_a_space_that_nobody_has_named_are_left_out() -> None:
    """Their length is not known."""
    node, peer = attached(Node())
    peer.seal(1)
    node.state.known.clear()
    (look,) = listed(node)
    assert look.blocks == []
