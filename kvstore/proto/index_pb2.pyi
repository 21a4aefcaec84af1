from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Trust(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRUST_UNSPECIFIED: _ClassVar[Trust]
    TRUST_EXACT: _ClassVar[Trust]
    TRUST_CATCHING_UP: _ClassVar[Trust]
    TRUST_STALE: _ClassVar[Trust]
    TRUST_OUT: _ClassVar[Trust]
TRUST_UNSPECIFIED: Trust
TRUST_EXACT: Trust
TRUST_CATCHING_UP: Trust
TRUST_STALE: Trust
TRUST_OUT: Trust

class Tokens(_message.Message):
    __slots__ = ("ids", "block_tokens", "hash_seed", "cache_salt")
    IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    block_tokens: int
    hash_seed: str
    cache_salt: str
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., block_tokens: _Optional[int] = ..., hash_seed: _Optional[str] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("tenant", "space", "keys", "tokens")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    space: bytes
    keys: bytes
    tokens: Tokens
    def __init__(self, tenant: _Optional[str] = ..., space: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("node", "engine", "rank", "hbm_blocks", "dram_blocks", "file_blocks", "trust")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    HBM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FILE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    node: str
    engine: str
    rank: int
    hbm_blocks: int
    dram_blocks: int
    file_blocks: int
    trust: Trust
    def __init__(self, node: _Optional[str] = ..., engine: _Optional[str] = ..., rank: _Optional[int] = ..., hbm_blocks: _Optional[int] = ..., dram_blocks: _Optional[int] = ..., file_blocks: _Optional[int] = ..., trust: _Optional[_Union[Trust, str]] = ...) -> None: ...

class MatchReply(_message.Message):
    __slots__ = ("trust", "holders", "blocks")
    TRUST_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    trust: Trust
    holders: _containers.RepeatedCompositeFieldContainer[Holder]
    blocks: int
    def __init__(self, trust: _Optional[_Union[Trust, str]] = ..., holders: _Optional[_Iterable[_Union[Holder, _Mapping]]] = ..., blocks: _Optional[int] = ...) -> None: ...

class NodesRequest(_message.Message):
    __slots__ = ("engines",)
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    engines: bool
    def __init__(self, engines: bool = ...) -> None: ...

class Engine(_message.Message):
    __slots__ = ("engine", "tenant", "space", "model", "rank", "role", "address", "queue")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    engine: str
    tenant: str
    space: bytes
    model: str
    rank: int
    role: str
    address: str
    queue: int
    def __init__(self, engine: _Optional[str] = ..., tenant: _Optional[str] = ..., space: _Optional[bytes] = ..., model: _Optional[str] = ..., rank: _Optional[int] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., queue: _Optional[int] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("node", "incarnation", "address", "trust", "sequence", "load", "engines")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    node: str
    incarnation: int
    address: str
    trust: Trust
    sequence: int
    load: Load
    engines: _containers.RepeatedCompositeFieldContainer[Engine]
    def __init__(self, node: _Optional[str] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ..., trust: _Optional[_Union[Trust, str]] = ..., sequence: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., engines: _Optional[_Iterable[_Union[Engine, _Mapping]]] = ...) -> None: ...

class NodesReply(_message.Message):
    __slots__ = ("trust", "nodes")
    TRUST_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    trust: Trust
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    def __init__(self, trust: _Optional[_Union[Trust, str]] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("nodes", "prefix", "engines")
    NODES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    nodes: bool
    prefix: MatchRequest
    engines: bool
    def __init__(self, nodes: bool = ..., prefix: _Optional[_Union[MatchRequest, _Mapping]] = ..., engines: bool = ...) -> None: ...

class WatchReply(_message.Message):
    __slots__ = ("nodes", "gone", "prefix")
    NODES_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    gone: _containers.RepeatedScalarFieldContainer[str]
    prefix: MatchReply
    def __init__(self, nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., gone: _Optional[_Iterable[str]] = ..., prefix: _Optional[_Union[MatchReply, _Mapping]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("at_ms", "dram_bytes", "dram_used_bytes", "file_bytes", "file_used_bytes", "blocks_hit", "blocks_missed", "stored_bytes", "leased_bytes", "fetched_bytes", "served_bytes", "fetch_p50_us", "fetch_p99_us", "leases", "engines", "slots_quarantined", "replicas", "replicas_reached", "saved_ms", "waited_ms")
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAM_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILE_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_HIT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_MISSED_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCH_P50_US_FIELD_NUMBER: _ClassVar[int]
    FETCH_P99_US_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_REACHED_FIELD_NUMBER: _ClassVar[int]
    SAVED_MS_FIELD_NUMBER: _ClassVar[int]
    WAITED_MS_FIELD_NUMBER: _ClassVar[int]
    at_ms: int
    dram_bytes: int
    dram_used_bytes: int
    file_bytes: int
    file_used_bytes: int
    blocks_hit: int
    blocks_missed: int
    stored_bytes: int
    leased_bytes: int
    fetched_bytes: int
    served_bytes: int
    fetch_p50_us: int
    fetch_p99_us: int
    leases: int
    engines: int
    slots_quarantined: int
    replicas: int
    replicas_reached: int
    saved_ms: int
    waited_ms: int
    def __init__(self, at_ms: _Optional[int] = ..., dram_bytes: _Optional[int] = ..., dram_used_bytes: _Optional[int] = ..., file_bytes: _Optional[int] = ..., file_used_bytes: _Optional[int] = ..., blocks_hit: _Optional[int] = ..., blocks_missed: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., fetched_bytes: _Optional[int] = ..., served_bytes: _Optional[int] = ..., fetch_p50_us: _Optional[int] = ..., fetch_p99_us: _Optional[int] = ..., leases: _Optional[int] = ..., engines: _Optional[int] = ..., slots_quarantined: _Optional[int] = ..., replicas: _Optional[int] = ..., replicas_reached: _Optional[int] = ..., saved_ms: _Optional[int] = ..., waited_ms: _Optional[int] = ...) -> None: ...
