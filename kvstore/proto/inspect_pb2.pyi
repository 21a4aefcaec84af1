from kvstore.proto import index_pb2 as _index_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodesReply(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[NodeReport]
    def __init__(self, rows: _Optional[_Iterable[_Union[NodeReport, _Mapping]]] = ...) -> None: ...

class NodeReport(_message.Message):
    __slots__ = ("incarnation", "connections", "owners", "sessions", "leases", "blocks", "restarts", "blocks_kept")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_KEPT_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    connections: int
    owners: int
    sessions: int
    leases: int
    blocks: int
    restarts: int
    blocks_kept: int
    def __init__(self, incarnation: _Optional[str] = ..., connections: _Optional[int] = ..., owners: _Optional[int] = ..., sessions: _Optional[int] = ..., leases: _Optional[int] = ..., blocks: _Optional[int] = ..., restarts: _Optional[int] = ..., blocks_kept: _Optional[int] = ...) -> None: ...

class UnservedRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UnservedReply(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[UnservedReport]
    def __init__(self, rows: _Optional[_Iterable[_Union[UnservedReport, _Mapping]]] = ...) -> None: ...

class UnservedReport(_message.Message):
    __slots__ = ("engine", "tenant", "reason")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    engine: str
    tenant: str
    reason: str
    def __init__(self, engine: _Optional[str] = ..., tenant: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class TransfersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TransfersReply(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[TransferReport]
    def __init__(self, rows: _Optional[_Iterable[_Union[TransferReport, _Mapping]]] = ...) -> None: ...

class TransferReport(_message.Message):
    __slots__ = ("kind", "backend", "count", "size_bytes", "bytes_per_s", "p50_us", "p95_us", "p99_us")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    P50_US_FIELD_NUMBER: _ClassVar[int]
    P95_US_FIELD_NUMBER: _ClassVar[int]
    P99_US_FIELD_NUMBER: _ClassVar[int]
    kind: str
    backend: str
    count: int
    size_bytes: int
    bytes_per_s: int
    p50_us: int
    p95_us: int
    p99_us: int
    def __init__(self, kind: _Optional[str] = ..., backend: _Optional[str] = ..., count: _Optional[int] = ..., size_bytes: _Optional[int] = ..., bytes_per_s: _Optional[int] = ..., p50_us: _Optional[int] = ..., p95_us: _Optional[int] = ..., p99_us: _Optional[int] = ...) -> None: ...

class MembersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MembersReply(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[MemberReport]
    def __init__(self, rows: _Optional[_Iterable[_Union[MemberReport, _Mapping]]] = ...) -> None: ...

class MemberReport(_message.Message):
    __slots__ = ("node", "trust", "address", "incarnation", "sequence")
    NODE_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    node: str
    trust: str
    address: str
    incarnation: str
    sequence: int
    def __init__(self, node: _Optional[str] = ..., trust: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[str] = ..., sequence: _Optional[int] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadReply(_message.Message):
    __slots__ = ("node", "incarnation", "load")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    node: str
    incarnation: int
    load: _index_pb2.Load
    def __init__(self, node: _Optional[str] = ..., incarnation: _Optional[int] = ..., load: _Optional[_Union[_index_pb2.Load, _Mapping]] = ...) -> None: ...

class TiersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TiersReply(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[TierReport]
    def __init__(self, rows: _Optional[_Iterable[_Union[TierReport, _Mapping]]] = ...) -> None: ...

class TierReport(_message.Message):
    __slots__ = ("tier", "capacity_bytes", "ready_bytes", "used_bytes", "blocks", "slots_sealed", "slots_granted", "slots_quarantined", "slots_leased", "policy", "not_admitted", "over_budget", "budget_left_bytes", "reads", "writes", "scrubbed_blocks", "scrubbed_bytes", "scrub_bad", "scrub_age_ms")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    READY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_SEALED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_GRANTED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_LEASED_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    NOT_ADMITTED_FIELD_NUMBER: _ClassVar[int]
    OVER_BUDGET_FIELD_NUMBER: _ClassVar[int]
    BUDGET_LEFT_BYTES_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    SCRUBBED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SCRUBBED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SCRUB_BAD_FIELD_NUMBER: _ClassVar[int]
    SCRUB_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    tier: str
    capacity_bytes: int
    ready_bytes: int
    used_bytes: int
    blocks: int
    slots_sealed: int
    slots_granted: int
    slots_quarantined: int
    slots_leased: int
    policy: str
    not_admitted: int
    over_budget: int
    budget_left_bytes: int
    reads: str
    writes: str
    scrubbed_blocks: int
    scrubbed_bytes: int
    scrub_bad: int
    scrub_age_ms: int
    def __init__(self, tier: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., ready_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., slots_sealed: _Optional[int] = ..., slots_granted: _Optional[int] = ..., slots_quarantined: _Optional[int] = ..., slots_leased: _Optional[int] = ..., policy: _Optional[str] = ..., not_admitted: _Optional[int] = ..., over_budget: _Optional[int] = ..., budget_left_bytes: _Optional[int] = ..., reads: _Optional[str] = ..., writes: _Optional[str] = ..., scrubbed_blocks: _Optional[int] = ..., scrubbed_bytes: _Optional[int] = ..., scrub_bad: _Optional[int] = ..., scrub_age_ms: _Optional[int] = ...) -> None: ...

class QuotasRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class QuotasReply(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[QuotaReport]
    def __init__(self, rows: _Optional[_Iterable[_Union[QuotaReport, _Mapping]]] = ...) -> None: ...

class QuotaReport(_message.Message):
    __slots__ = ("quota", "promised_bytes", "used_bytes")
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    PROMISED_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    quota: str
    promised_bytes: int
    used_bytes: int
    def __init__(self, quota: _Optional[str] = ..., promised_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ...) -> None: ...

class SpacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SpacesReply(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[SpaceReport]
    def __init__(self, rows: _Optional[_Iterable[_Union[SpaceReport, _Mapping]]] = ...) -> None: ...

class SpaceReport(_message.Message):
    __slots__ = ("space", "tenant", "label", "blocks_dram", "blocks_file", "bytes_dram", "engines", "off")
    SPACE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_DRAM_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FILE_FIELD_NUMBER: _ClassVar[int]
    BYTES_DRAM_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    OFF_FIELD_NUMBER: _ClassVar[int]
    space: str
    tenant: str
    label: str
    blocks_dram: int
    blocks_file: int
    bytes_dram: int
    engines: int
    off: str
    def __init__(self, space: _Optional[str] = ..., tenant: _Optional[str] = ..., label: _Optional[str] = ..., blocks_dram: _Optional[int] = ..., blocks_file: _Optional[int] = ..., bytes_dram: _Optional[int] = ..., engines: _Optional[int] = ..., off: _Optional[str] = ...) -> None: ...

class BlocksRequest(_message.Message):
    __slots__ = ("limit", "space")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    limit: int
    space: str
    def __init__(self, limit: _Optional[int] = ..., space: _Optional[str] = ...) -> None: ...

class BlocksReply(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[BlockReport]
    def __init__(self, rows: _Optional[_Iterable[_Union[BlockReport, _Mapping]]] = ...) -> None: ...

class BlockReport(_message.Message):
    __slots__ = ("key", "space", "tenant", "shard", "tiers", "slot", "generation", "leases")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    key: str
    space: str
    tenant: str
    shard: str
    tiers: str
    slot: int
    generation: int
    leases: int
    def __init__(self, key: _Optional[str] = ..., space: _Optional[str] = ..., tenant: _Optional[str] = ..., shard: _Optional[str] = ..., tiers: _Optional[str] = ..., slot: _Optional[int] = ..., generation: _Optional[int] = ..., leases: _Optional[int] = ...) -> None: ...

class LeasesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeasesReply(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[LeaseReport]
    def __init__(self, rows: _Optional[_Iterable[_Union[LeaseReport, _Mapping]]] = ...) -> None: ...

class LeaseReport(_message.Message):
    __slots__ = ("engine_id", "session", "lease", "blocks", "age_ms", "expires_in_ms")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_MS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    session: int
    lease: int
    blocks: int
    age_ms: int
    expires_in_ms: int
    def __init__(self, engine_id: _Optional[str] = ..., session: _Optional[int] = ..., lease: _Optional[int] = ..., blocks: _Optional[int] = ..., age_ms: _Optional[int] = ..., expires_in_ms: _Optional[int] = ...) -> None: ...

class JobsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JobsReply(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[JobReport]
    def __init__(self, rows: _Optional[_Iterable[_Union[JobReport, _Mapping]]] = ...) -> None: ...

class JobReport(_message.Message):
    __slots__ = ("engine_id", "rank", "connection", "attached", "slots_granted", "slots_quarantined")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_GRANTED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    rank: int
    connection: int
    attached: bool
    slots_granted: int
    slots_quarantined: int
    def __init__(self, engine_id: _Optional[str] = ..., rank: _Optional[int] = ..., connection: _Optional[int] = ..., attached: bool = ..., slots_granted: _Optional[int] = ..., slots_quarantined: _Optional[int] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("space",)
    SPACE_FIELD_NUMBER: _ClassVar[int]
    space: str
    def __init__(self, space: _Optional[str] = ...) -> None: ...

class ClearReply(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class RequestsRequest(_message.Message):
    __slots__ = ("request", "limit")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    request: str
    limit: int
    def __init__(self, request: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class RequestsReply(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[RequestReport]
    def __init__(self, rows: _Optional[_Iterable[_Union[RequestReport, _Mapping]]] = ...) -> None: ...

class RequestReport(_message.Message):
    __slots__ = ("number", "request", "engine_id", "label", "tenant", "space", "ended_ms_ago", "block_tokens", "prompt_tokens", "local_tokens", "loaded_tokens", "file_tokens", "peer_tokens", "outcome", "text", "queued_us", "lookup_us", "promotion_us", "load_us", "stored_blocks")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    ENDED_MS_AGO_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FILE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PEER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_US_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_US_FIELD_NUMBER: _ClassVar[int]
    PROMOTION_US_FIELD_NUMBER: _ClassVar[int]
    LOAD_US_FIELD_NUMBER: _ClassVar[int]
    STORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    number: int
    request: str
    engine_id: str
    label: str
    tenant: str
    space: str
    ended_ms_ago: int
    block_tokens: int
    prompt_tokens: int
    local_tokens: int
    loaded_tokens: int
    file_tokens: int
    peer_tokens: int
    outcome: str
    text: str
    queued_us: int
    lookup_us: int
    promotion_us: int
    load_us: int
    stored_blocks: int
    def __init__(self, number: _Optional[int] = ..., request: _Optional[str] = ..., engine_id: _Optional[str] = ..., label: _Optional[str] = ..., tenant: _Optional[str] = ..., space: _Optional[str] = ..., ended_ms_ago: _Optional[int] = ..., block_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., local_tokens: _Optional[int] = ..., loaded_tokens: _Optional[int] = ..., file_tokens: _Optional[int] = ..., peer_tokens: _Optional[int] = ..., outcome: _Optional[str] = ..., text: _Optional[str] = ..., queued_us: _Optional[int] = ..., lookup_us: _Optional[int] = ..., promotion_us: _Optional[int] = ..., load_us: _Optional[int] = ..., stored_blocks: _Optional[int] = ...) -> None: ...

class RangesRequest(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class RangesReply(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[RangeReport]
    def __init__(self, rows: _Optional[_Iterable[_Union[RangeReport, _Mapping]]] = ...) -> None: ...

class RangeReport(_message.Message):
    __slots__ = ("first_block", "blocks", "tier", "reason", "text", "node", "sought")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SOUGHT_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    blocks: int
    tier: str
    reason: str
    text: str
    node: str
    sought: str
    def __init__(self, first_block: _Optional[int] = ..., blocks: _Optional[int] = ..., tier: _Optional[str] = ..., reason: _Optional[str] = ..., text: _Optional[str] = ..., node: _Optional[str] = ..., sought: _Optional[str] = ...) -> None: ...

class HashingsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HashingsReply(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[HashingReport]
    def __init__(self, rows: _Optional[_Iterable[_Union[HashingReport, _Mapping]]] = ...) -> None: ...

class HashingReport(_message.Message):
    __slots__ = ("space", "tenant", "label", "block_tokens", "hash_algorithm", "hash_seed")
    SPACE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    space: str
    tenant: str
    label: str
    block_tokens: int
    hash_algorithm: str
    hash_seed: str
    def __init__(self, space: _Optional[str] = ..., tenant: _Optional[str] = ..., label: _Optional[str] = ..., block_tokens: _Optional[int] = ..., hash_algorithm: _Optional[str] = ..., hash_seed: _Optional[str] = ...) -> None: ...

class PrefixRequest(_message.Message):
    __slots__ = ("space", "tenant", "keys")
    SPACE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    space: bytes
    tenant: str
    keys: bytes
    def __init__(self, space: _Optional[bytes] = ..., tenant: _Optional[str] = ..., keys: _Optional[bytes] = ...) -> None: ...

class MemoriesRequest(_message.Message):
    __slots__ = ("prefix",)
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    prefix: PrefixRequest
    def __init__(self, prefix: _Optional[_Union[PrefixRequest, _Mapping]] = ...) -> None: ...

class MemoriesReply(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[MemoryReport]
    def __init__(self, rows: _Optional[_Iterable[_Union[MemoryReport, _Mapping]]] = ...) -> None: ...

class MemoryReport(_message.Message):
    __slots__ = ("engine", "rank", "space", "tenant", "state", "blocks", "left_out")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    engine: str
    rank: int
    space: str
    tenant: str
    state: str
    blocks: int
    left_out: int
    def __init__(self, engine: _Optional[str] = ..., rank: _Optional[int] = ..., space: _Optional[str] = ..., tenant: _Optional[str] = ..., state: _Optional[str] = ..., blocks: _Optional[int] = ..., left_out: _Optional[int] = ...) -> None: ...
