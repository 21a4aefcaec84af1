"""What is announced while old segments are being read, and the bell that says "look"."""

from __future__ import annotations

import select
from collections.abc import Iterator

import pytest

from kvstore.tier_events import FileKnown, FileTierEvent, FileWritten
from kvstore.tiers.file.parts import KNOWN_MAX, Leaving, Outbox
from kvstore.wire.record import Scope
from tests.unit.tiers.file.kit import SCOPE, key

KNOWN = FileKnown(SCOPE, key(1), b"\1" * 8, bytes(16))


@pytest.fixture
def outbox() -> Iterator[Outbox]:
    made = Outbox()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("own", "told"), [(True, []), (False, [KNOWN])], ids=["own", "of another node"]
)
def test_what_was_cleared_during_recovery_is_not_announced(
    outbox: Outbox, *, own: bool, told: list[FileTierEvent]
) -> None:
    outbox.void(SCOPE.tenant, None)
    outbox.known(KNOWN, own=own)
    assert list(outbox.take()) == told
    outbox.recovered()
    outbox.known(KNOWN, own=True)
    assert list(outbox.take()) == [KNOWN], "found later, so written later"


def test_what_waits_when_it_is_cleared_is_not_told(outbox: Outbox) -> None:
    kept = FileKnown(Scope("another", SCOPE.space, SCOPE.shard, 1), key(2), b"\2" * 8, bytes(16))
    written = FileWritten(1, b"")
    outbox.put(written)
    for event in [KNOWN] * (KNOWN_MAX - 1) + [kept]:
        outbox.known(event, own=False)
    outbox.void(SCOPE.tenant, None)
    assert list(outbox.take()) == [written, kept]
    assert not select.select([outbox], [], [], 0)[0]
    for _ in range(KNOWN_MAX):  # none waits: there is room again
        outbox.known(KNOWN, own=False)


def test_what_is_found_while_the_tier_is_closed_ends_the_recovery(outbox: Outbox) -> None:
    outbox.known(KNOWN, own=True)
    outbox.stop()
    with pytest.raises(Leaving):
        outbox.known(KNOWN, own=True)
    assert list(outbox.take()) == [KNOWN]
