"""Every field of every struct that leaves a process has a bound; what is beyond is refused."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import msgspec
import pytest
from msgspec import inspect

import kvstore.wire
from kvstore.errors import ProtocolError
from kvstore.wire.bounds import WORD
from kvstore.wire.messages import DATAGRAM_BYTES_MAX, HelloRank, decode_from_engine, encode
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


@pytest.mark.parametrize(
    "struct", structs(), ids=lambda struct: f"{struct.__module__}.{struct.__name__}"
)
def test_every_field_of_a_struct_has_a_bound(struct: type[msgspec.Struct]) -> None:
    assert list(unbounded(inspect.type_info(struct), struct.__name__)) == []


def test_there_is_something_to_look_at_and_the_look_finds_it() -> None:
    assert len(structs()) > 40
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


def absurd(**fields: int) -> HelloRank:
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
        ("hash_block_tokens", 2**63),
        ("hash_block_tokens", -1),
        ("block_tokens", -16),
        ("block_tokens", 0),
        ("layer_count", 2**40),
        ("kv_head_count", -1),
        ("token_bytes", 2**62),
        ("layer_begin", -1),
        ("head_end", 2**33),
    ],
)
def test_an_absurd_hello_is_refused_in_one_sentence(field: str, value: int) -> None:
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
    assert len(str(refused.value)) <= 300
