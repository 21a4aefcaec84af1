from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RouteTokens(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("model", "keys", "tokens", "prompt_tokens", "block_tokens", "output_tokens_max", "tenant", "service", "session", "subset")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SUBSET_FIELD_NUMBER: _ClassVar[int]
    model: str
    keys: bytes
    tokens: RouteTokens
    prompt_tokens: int
    block_tokens: int
    output_tokens_max: int
    tenant: str
    service: str
    session: str
    subset: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., keys: _Optional[bytes] = ..., tokens: _Optional[_Union[RouteTokens, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., block_tokens: _Optional[int] = ..., output_tokens_max: _Optional[int] = ..., tenant: _Optional[str] = ..., service: _Optional[str] = ..., session: _Optional[str] = ..., subset: _Optional[_Iterable[str]] = ...) -> None: ...

class WorkerFailed(_message.Message):
    __slots__ = ("has_streamed",)
    HAS_STREAMED_FIELD_NUMBER: _ClassVar[int]
    has_streamed: bool
    def __init__(self, has_streamed: bool = ...) -> None: ...

class FirstPiece(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Done(_message.Message):
    __slots__ = ("is_refused", "cached_tokens", "output_tokens")
    IS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    is_refused: bool
    cached_tokens: int
    output_tokens: int
    def __init__(self, is_refused: bool = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ...) -> None: ...

class RouteWord(_message.Message):
    __slots__ = ("ask", "failed", "first", "done")
    ASK_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ask: Ask
    failed: WorkerFailed
    first: FirstPiece
    done: Done
    def __init__(self, ask: _Optional[_Union[Ask, _Mapping]] = ..., failed: _Optional[_Union[WorkerFailed, _Mapping]] = ..., first: _Optional[_Union[FirstPiece, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("worker", "address", "model", "fallbacks", "status", "reason", "retry_after_ms", "predicted_s", "cached_tokens")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    address: str
    model: str
    fallbacks: _containers.RepeatedScalarFieldContainer[str]
    status: int
    reason: str
    retry_after_ms: int
    predicted_s: float
    cached_tokens: int
    def __init__(self, worker: _Optional[str] = ..., address: _Optional[str] = ..., model: _Optional[str] = ..., fallbacks: _Optional[_Iterable[str]] = ..., status: _Optional[int] = ..., reason: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., predicted_s: _Optional[float] = ..., cached_tokens: _Optional[int] = ...) -> None: ...
