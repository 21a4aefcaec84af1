"""What the engine lists for the scrub of dram, and what it does with what was found."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstore.engine import trust
from kvstore.engine.events import Clear, Tick
from kvstore.engine.trust import NO_PASS, Sealed
from kvstore.engine.why.reasons import Reason
from kvstore.tier_events import Scrubbed
from kvstore.types import Tier
from kvstore.units import NS_PER_MS
from kvstore.wire.record import Scope
from tests.unit.engine.disk import SPACE, DiskNode
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
)


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
