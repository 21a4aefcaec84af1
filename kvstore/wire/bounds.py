"""Bounded kinds of fields, which the structs of `wire` are made of: nothing that leaves a process
is without an end. Decoding checks them, so whoever holds a decoded message need not.

A test walks all structs of the package and fails for a number, text or list without bounds.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from kvstore.types import CHECKSUM_BYTES, KEY_BYTES, Incarnation, SpaceId

NAME_BYTES_MAX: Final = 255
KEYS_PER_DATAGRAM_MAX: Final = 2048
TOKENS_MAX: Final = 1 << 20
"""Most tokens of a block, and most bytes of a token in one head of one layer."""
SENTENCE_CHARS_MAX: Final = 1024

WORD: Final = "u64"
"""Title of numbers that use all 64 bits: msgspec takes no bound beyond 63, msgpack has no number
beyond 64."""
Word = Annotated[int, Meta(ge=0, title=WORD)]
I64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
U64 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Small = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=1, le=65535)]
Tokens = Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
BlockBytes = Annotated[int, Meta(ge=1, le=1 << 40)]

Name = Annotated[str, Meta(min_length=1, max_length=NAME_BYTES_MAX)]
"""In UTF-8 at most NAME_BYTES_MAX long, which `messages.decode_from_engine` checks of a Hello and
`peers.decode_ask` of a node and a tenant."""
Label = Annotated[str, Meta(max_length=NAME_BYTES_MAX)]
Hex64 = Annotated[str, Meta(max_length=16)]
"""A number of 64 bits in hex."""
Sentence = Annotated[str, Meta(max_length=SENTENCE_CHARS_MAX)]

Id = Annotated[bytes, Meta(max_length=16)]
Key = Annotated[bytes, Meta(max_length=KEY_BYTES)]
Space32 = Annotated[SpaceId, Meta(max_length=32)]
WholeSpace = Annotated[SpaceId, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Started = Annotated[Incarnation, Meta(ge=1, le=2**63 - 1)]
Checksum = Annotated[bytes, Meta(max_length=CHECKSUM_BYTES)]
KeyArray = Annotated[bytes, Meta(max_length=KEYS_PER_DATAGRAM_MAX * KEY_BYTES)]
