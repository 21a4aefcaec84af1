"""Every field of every struct that leaves a process has a bound; what is beyond is refused."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

import kvstore.wire
from kvstore.errors import ProtocolError
from kvstore.wire import bounds
from kvstore.wire.bounds import WORD, KeyArray
from kvstore.wire.kv_events import Hashes
from kvstore.wire.messages import (
    DATAGRAM_BYTES_MAX,
    ChecksumArray,
    GenerationArray,
    HelloRank,
    LeaseList,
    SlotArray,
    decode_from_engine,
    encode,
)
from kvstore.wire.peers import (
    Cells,
    Flags,
    PayloadBytes,
    ShardBytes,
    SomeKeys,
)
from kvstore.wire.transfer_worker import Reason
from tests.unit.engine.harness import Hellos

_SIZED = (
    inspect.StrType,
    inspect.BytesType,
    inspect.ByteArrayType,
    inspect.MemoryViewType,
    inspect.ListType,
    inspect.SetType,
    inspect.FrozenSetType,
    inspect.VarTupleType,
    inspect.DictType,
)


def structs() -> list[type[msgspec.Struct]]:
    """All of the package."""
    found = []
    for module in pkgutil.iter_modules(kvstore.wire.__path__, "kvstore.wire."):
        for value in vars(importlib.import_module(module.name)).values():
            if (
                isinstance(value, type)
                and issubclass(value, msgspec.Struct)
                and value.__module__ == module.name
            ):
                found.append(value)
    return found


def unbounded(kind: inspect.Type, path: str, seen: tuple[type, ...] = ()) -> Iterator[str]:
    """What in a type has no end, by its path."""
    if isinstance(kind, inspect.Metadata):
        if kind.extra_json_schema == {"title": WORD}:  # no bound of msgspec's reaches so far
            assert isinstance(kind.type, inspect.IntType)
            assert kind.type.ge == 0
            return
        yield from unbounded(kind.type, path, seen)
    elif isinstance(kind, inspect.IntType):
        if (kind.ge is None and kind.gt is None) or (kind.le is None and kind.lt is None):
            yield path
    elif isinstance(kind, _SIZED) and kind.max_length is None:
        yield path
    if isinstance(kind, inspect.StructType):
        if kind.cls in seen:
            return
        for field in kind.fields:
            yield from unbounded(field.type, f"{path}.{field.name}", (*seen, kind.cls))
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from unbounded(one, path, seen)
    elif isinstance(kind, inspect.TupleType):
        for one in kind.item_types:
            yield from unbounded(one, f"{path}[]", seen)
    elif isinstance(kind, inspect.DictType):
        yield from unbounded(kind.key_type, f"{path} keys", seen)
        yield from unbounded(kind.value_type, f"{path} values", seen)
    elif isinstance(
        kind, inspect.ListType | inspect.SetType | inspect.FrozenSetType | inspect.VarTupleType
    ):
        yield from unbounded(kind.item_type, f"{path}[]", seen)


def test_every_field_of_a_struct_has_a_bound() -> None:
    assert len(structs()) > 40
    for struct in structs():
        assert list(unbounded(inspect.type_info(struct), struct.__name__)) == []


NOT_NOTHING = {
    "locality": "LOCAL",
    "ownership": "kvstore",
    "writes": True,  # of one rank there is no other that could
    "paced": True,
    "last": True,
}
"""Defaults that say something, by field."""


def test_what_is_not_said_is_nothing() -> None:
    for struct in structs():
        for field in msgspec.structs.fields(struct):
            if field.required:
                continue
            empty = field.default is msgspec.NODEFAULT  # of a factory, as of lists
            default = field.default_factory() if empty else field.default
            parts = default if isinstance(default, tuple) and default else (default,)
            if not all(isinstance(part, msgspec.Struct) for part in parts):
                assert (default or None) == NOT_NOTHING.get(field.name), (struct, field.name)


@pytest.mark.parametrize(
    ("kind", "unit", "least", "most"),
    [
        *((bounds.I64, 1, -(2**63), 2**63 - 1), (bounds.U64, 1, 0, 2**63 - 1)),
        *((bounds.U32, 1, 0, 2**32 - 1), (bounds.Started, 1, 1, 2**63 - 1)),
        *((bounds.Small, 1, 0, 65_535), (bounds.Count, 1, 1, 65_535)),
        *((bounds.Tokens, 1, 1, 2**20), (bounds.BlockBytes, 1, 1, 2**40)),
        *((PayloadBytes, 1, 1, 2**30), (bounds.Name, "x", 1, 255)),
        *((bounds.Label, "x", 0, 255), (bounds.Hex64, "f", 0, 16)),
        *((bounds.Sentence, "x", 0, 1024), (bounds.Id, b"x", 0, 16)),
        *((bounds.Key, b"x", 0, 32), (bounds.Space32, b"x", 0, 32)),
        *((bounds.Checksum, b"x", 0, 16), (Hashes, [1], 0, 2**20)),
        *((Reason, "x", 0, 400), (KeyArray, b"x", 0, 2048 * 32)),
        *((SlotArray, b"x", 0, 2048 * 4), (GenerationArray, b"x", 0, 2048 * 8)),
        *((ChecksumArray, b"x", 0, 2048 * 16), (LeaseList, [1], 0, 4096)),
        *((bounds.WholeSpace, b"x", 32, 32), (SomeKeys, b"x", 32, 2048 * 32)),
        *((Cells, b"x", 0, 2**20), (Flags, b"x", 0, 2048), (ShardBytes, (1,), 0, 1024)),
    ],
)
def test_a_number_or_length_is_taken_up_to_its_bounds(
    kind: object, unit: Any, least: int, most: int
) -> None:
    """A number is a multiple of 1, anything else repeats its unit."""
    for size in (least, most):
        assert msgspec.convert(unit * size, kind) == unit * size
    outside = {least - 1, most + 1} if unit == 1 else {max(0, least - 1), most + 1} - {least}
    for size in outside:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(unit * size, kind)


def test_what_has_no_bound_is_found() -> None:
    inner = msgspec.defstruct("Rows", [("rows", list[dict[str, bytes]])])
    fields = [("number", int | None), ("inner", tuple.__class_getitem__((inner, ...)))]
    outer = msgspec.defstruct("Outer", fields)
    assert list(unbounded(inspect.type_info(outer), "Outer")) == [
        "Outer.number",
        "Outer.inner",
        "Outer.inner[].rows",
        "Outer.inner[].rows[]",
        "Outer.inner[].rows[] keys",
        "Outer.inner[].rows[] values",
    ]


def absurd(**fields: Any) -> HelloRank:
    """The Hello of a rank, with these numbers in its space or shard."""
    hello = Hellos("absurd").rank_hello(0)
    assert isinstance(hello, HelloRank)
    (group,) = hello.groups
    space = {name: value for name, value in fields.items() if hasattr(group.space, name)}
    shard = {name: value for name, value in fields.items() if name not in space}
    group = msgspec.structs.replace(
        group,
        space=msgspec.structs.replace(group.space, **space),
        shard=msgspec.structs.replace(group.shard, **shard),
    )
    return msgspec.structs.replace(hello, groups=(group,))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_tokens", 0),
        ("layer_count", 2**40),
        ("head_bytes", [2**62]),
        ("layer_begin", -1),
    ],
)
def test_an_absurd_hello_is_refused_in_one_sentence(field: str, value: Any) -> None:
    good = encode(absurd())
    assert isinstance(decode_from_engine(good), HelloRank)
    with pytest.raises(ProtocolError) as refused:
        decode_from_engine(encode(absurd(**{field: value})))
    sentence = str(refused.value)
    assert field in sentence
    assert "Expected `int`" in sentence
    assert "\n" not in sentence


def test_what_a_stranger_calls_a_field_does_not_make_the_sentence_long() -> None:
    hello = msgspec.to_builtins(Hellos("e").scheduler_hello()) | {
        "x" * (DATAGRAM_BYTES_MAX // 2): 1
    }
    with pytest.raises(ProtocolError) as refused:
        decode_from_engine(msgspec.msgpack.encode(hello))
    assert len(str(refused.value)) == len("malformed datagram: ") + 200


@pytest.mark.parametrize(
    ("ranks", "is_taken"), [(0, False), (1, True), (1024, True), (1025, False)]
)
def test_an_engine_has_no_more_than_1024_ranks(ranks: int, *, is_taken: bool) -> None:
    hello = msgspec.structs.replace(Hellos("e").scheduler_hello(), rank_count=ranks)
    with contextlib.nullcontext() if is_taken else pytest.raises(ProtocolError, match="rank_count"):
        assert decode_from_engine(encode(hello)) == hello
