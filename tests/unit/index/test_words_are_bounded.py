"""What one word of a node may have in it."""

from __future__ import annotations

import pytest

from kvstore.errors import ProtocolError
from kvstore.index.feed import Delta, SnapshotPart
from kvstore.peers.changes import DELTA_KEYS_MAX
from kvstore.proto import feeds, index_pb2 as pb
from tests.unit.index.words import hello

STORED = pb.Stored(tenant="t", space=bytes(32), tier=pb.TIER_DRAM, keys=bytes(32))
REMOVED = pb.Removed(tenant="t", space=bytes(32), tier=pb.TIER_DRAM, keys=bytes(32))
LEFT = pb.Change(left=pb.Left(engine="e"))


def test_of_changes_there_are_as_many_as_a_node_tells_at_once() -> None:
    most = feeds.CHANGES_MAX
    assert most >= DELTA_KEYS_MAX, "each change of a delta has a key, or counts as one"
    delta = feeds.word_of(pb.FeedWord(delta=pb.Delta(changes=[LEFT] * most)), hello())
    assert isinstance(delta, Delta)
    assert len(delta.changes) == most
    part = feeds.word_of(pb.FeedWord(part=pb.Part(stored=[STORED] * most)), hello())
    assert isinstance(part, SnapshotPart)
    assert len(part.stored) == most
    for word in (
        pb.FeedWord(delta=pb.Delta(changes=[LEFT] * (most + 1))),
        pb.FeedWord(part=pb.Part(stored=[STORED] * (most + 1))),
    ):
        with pytest.raises(ProtocolError, match="a word has 4096 changes at most"):
            feeds.word_of(word, hello())


def test_nothing_is_stored_or_removed_without_a_key() -> None:
    stored, removed = pb.Stored(), pb.Removed()
    stored.CopyFrom(STORED)
    removed.CopyFrom(REMOVED)
    stored.keys = removed.keys = b""
    for word in (
        pb.FeedWord(delta=pb.Delta(changes=[pb.Change(stored=stored)])),
        pb.FeedWord(delta=pb.Delta(changes=[pb.Change(removed=removed)])),
        pb.FeedWord(part=pb.Part(stored=[stored])),
    ):
        with pytest.raises(ProtocolError, match="without a key"):
            feeds.word_of(word, hello())
