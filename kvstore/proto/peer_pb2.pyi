from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrepareRequest(_message.Message):
    __slots__ = ("tenant", "space", "engine", "keys")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    space: bytes
    engine: str
    keys: bytes
    def __init__(self, tenant: _Optional[str] = ..., space: _Optional[bytes] = ..., engine: _Optional[str] = ..., keys: _Optional[bytes] = ...) -> None: ...

class PrepareReply(_message.Message):
    __slots__ = ("dram", "reading", "sought", "refused")
    DRAM_FIELD_NUMBER: _ClassVar[int]
    READING_FIELD_NUMBER: _ClassVar[int]
    SOUGHT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    dram: int
    reading: int
    sought: int
    refused: str
    def __init__(self, dram: _Optional[int] = ..., reading: _Optional[int] = ..., sought: _Optional[int] = ..., refused: _Optional[str] = ...) -> None: ...

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

class Grant(_message.Message):
    __slots__ = ("grant", "epoch", "transfer", "tenant", "space", "keys", "extents", "block_bytes", "deadline_ms", "descriptor")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    grant: int
    epoch: int
    transfer: str
    tenant: str
    space: bytes
    keys: bytes
    extents: bytes
    block_bytes: int
    deadline_ms: int
    descriptor: bytes
    def __init__(self, grant: _Optional[int] = ..., epoch: _Optional[int] = ..., transfer: _Optional[str] = ..., tenant: _Optional[str] = ..., space: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., extents: _Optional[bytes] = ..., block_bytes: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., descriptor: _Optional[bytes] = ...) -> None: ...

class Revoke(_message.Message):
    __slots__ = ("grant",)
    GRANT_FIELD_NUMBER: _ClassVar[int]
    grant: int
    def __init__(self, grant: _Optional[int] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("hello", "lend", "give_back", "grant", "revoke")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LEND_FIELD_NUMBER: _ClassVar[int]
    GIVE_BACK_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    REVOKE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    lend: Lend
    give_back: GiveBack
    grant: Grant
    revoke: Revoke
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., lend: _Optional[_Union[Lend, _Mapping]] = ..., give_back: _Optional[_Union[GiveBack, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., revoke: _Optional[_Union[Revoke, _Mapping]] = ...) -> None: ...

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

class Pushed(_message.Message):
    __slots__ = ("grant", "epoch", "first", "shards", "checksums")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    grant: int
    epoch: int
    first: int
    shards: _containers.RepeatedCompositeFieldContainer[Shard]
    checksums: bytes
    def __init__(self, grant: _Optional[int] = ..., epoch: _Optional[int] = ..., first: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[Shard, _Mapping]]] = ..., checksums: _Optional[bytes] = ...) -> None: ...

class PushOver(_message.Message):
    __slots__ = ("grant", "epoch", "reason", "is_quiet")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_QUIET_FIELD_NUMBER: _ClassVar[int]
    grant: int
    epoch: int
    reason: str
    is_quiet: bool
    def __init__(self, grant: _Optional[int] = ..., epoch: _Optional[int] = ..., reason: _Optional[str] = ..., is_quiet: bool = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("welcome", "lent", "returned", "pushed", "push_over")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    LENT_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    PUSHED_FIELD_NUMBER: _ClassVar[int]
    PUSH_OVER_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    lent: Lent
    returned: Returned
    pushed: Pushed
    push_over: PushOver
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., lent: _Optional[_Union[Lent, _Mapping]] = ..., returned: _Optional[_Union[Returned, _Mapping]] = ..., pushed: _Optional[_Union[Pushed, _Mapping]] = ..., push_over: _Optional[_Union[PushOver, _Mapping]] = ...) -> None: ...
