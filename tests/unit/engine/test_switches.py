"""Spaces that are switched off: by whom, what that means, and how it ends."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.engine import engine as engine_module, trust
from kvstore.engine.events import Clear, Command, SwitchedOff
from kvstore.engine.why.reasons import Reason
from kvstore.tier_events import FileKnown, FileReclaim, VoidFile
from kvstore.types import SpaceId, Tier
from kvstore.wire.messages import Compared, Grant, LeaseReply, Story
from kvstore.wire.record import Scope
from kvstore.wire.space import fingerprint
from tests.unit.engine.disk import BLOCK_BYTES, SPACE, DiskNode, known, places
from tests.unit.engine.harness import SMALL, WHOLE, Node, Peer, attached, key, keys, short, space
from tests.unit.engine.mortal import MortalNode

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
    node, peer = attached(Node())
    (place,) = peer.seal(1)
    peer.lease(7, 1)
    compared(peer, 7, 0)
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
    node, peer = attached(Node())
    peer.seal(1)
    peer.lease(7, 1)
    compared(peer, 7, 0)
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
    part = FileKnown(Scope("t", SPACE, WHOLE, BLOCK_BYTES), keys(*range(1, 9)), places(1, 8), b"")
    node.step(FileReclaim(3, (part,)))
    assert [command.keep for command in node.reclaimed] == [b""]


def test_explain_says_that_the_space_is_off() -> None:
    node, peer = attached(Node())
    peer.seal(1)
    peer.lease(7, 1)
    compared(peer, 7, 0)
    peer.lease(8, 1, 2)
    node.hear(
        peer.scheduler,
        Story(
            request="r",
            prompt_tokens=2 * SMALL.block_tokens,
            outcome="not stored",
            session=peer.session,
            leases=[8],
        ),
    )
    (row,) = node.engine.explain.requests("r", limit=1)
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
