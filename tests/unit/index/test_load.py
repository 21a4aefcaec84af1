"""What a node says that it does: kept as it said it last, by this process of it only."""

from __future__ import annotations

from kvstore.index.index import Index, Member
from kvstore.proto import forms, index_pb2 as pb
from kvstore.types import Incarnation
from kvstore.wire.feed import FeedBeat, Hello
from kvstore.wire.load import Load

BUSY = Load(**{name: 2**40 + n for n, name in enumerate(Load.__struct_fields__)})


def hello(incarnation: int) -> Hello:
    return Hello("n", Incarnation(incarnation), 1, 0)


def beat(load: Load | None, incarnation: int = 1) -> FeedBeat:
    return FeedBeat("n", Incarnation(incarnation), 1, 0, load)


def known(index: Index) -> Member:
    (member,) = index.members(0)
    return member


def test_it_travels_in_answers_whole() -> None:
    message = pb.Node(load=forms.load_message(BUSY))
    assert forms.load_of(pb.Node.FromString(message.SerializeToString())) == BUSY
    assert [field.name for field in pb.Load.DESCRIPTOR.fields] == list(Load.__struct_fields__)
