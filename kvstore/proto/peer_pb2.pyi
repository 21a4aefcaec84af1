from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("node", "incarnation")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    node: str
    incarnation: int
    def __init__(self, node: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Lend(_message.Message):
    __slots__ = ("loan", "tenant", "space", "keys")
    LOAN_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    loan: int
    tenant: str
    space: bytes
    keys: bytes
    def __init__(self, loan: _Optional[int] = ..., tenant: _Optional[str] = ..., space: _Optional[bytes] = ..., keys: _Optional[bytes] = ...) -> None: ...

class GiveBack(_message.Message):
    __slots__ = ("loan",)
    LOAN_FIELD_NUMBER: _ClassVar[int]
    loan: int
    def __init__(self, loan: _Optional[int] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("hello", "lend", "give_back")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LEND_FIELD_NUMBER: _ClassVar[int]
    GIVE_BACK_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    lend: Lend
    give_back: GiveBack
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., lend: _Optional[_Union[Lend, _Mapping]] = ..., give_back: _Optional[_Union[GiveBack, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("node", "incarnation", "descriptor")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    node: str
    incarnation: int
    descriptor: bytes
    def __init__(self, node: _Optional[str] = ..., incarnation: _Optional[int] = ..., descriptor: _Optional[bytes] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("layer_begin", "layer_end", "head_begin", "head_end", "block_bytes")
    LAYER_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    HEAD_BEGIN_FIELD_NUMBER: _ClassVar[int]
    HEAD_END_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    layer_begin: int
    layer_end: int
    head_begin: int
    head_end: int
    block_bytes: int
    def __init__(self, layer_begin: _Optional[int] = ..., layer_end: _Optional[int] = ..., head_begin: _Optional[int] = ..., head_end: _Optional[int] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class Lent(_message.Message):
    __slots__ = ("loan", "shards", "slots", "checksums")
    LOAN_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    loan: int
    shards: _containers.RepeatedCompositeFieldContainer[Shard]
    slots: bytes
    checksums: bytes
    def __init__(self, loan: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[Shard, _Mapping]]] = ..., slots: _Optional[bytes] = ..., checksums: _Optional[bytes] = ...) -> None: ...

class Returned(_message.Message):
    __slots__ = ("loan", "intact")
    LOAN_FIELD_NUMBER: _ClassVar[int]
    INTACT_FIELD_NUMBER: _ClassVar[int]
    loan: int
    intact: bytes
    def __init__(self, loan: _Optional[int] = ..., intact: _Optional[bytes] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("welcome", "lent", "returned")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    LENT_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    lent: Lent
    returned: Returned
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., lent: _Optional[_Union[Lent, _Mapping]] = ..., returned: _Optional[_Union[Returned, _Mapping]] = ...) -> None: ...
