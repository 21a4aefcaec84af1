"""Questions to the index and its answers, as messages to and from the values of its core: checked
here, once, at the door.

Does not cover: messages of a feed (`wire.feed`), rows of `inspect` (`rows`).

Ways for a question to be broken, each a ProtocolError: a space or keys of another length than 32
bytes each; no prompt; more keys or tokens than fit a question; a name that is too long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from kvstore.errors import ProtocolError
from kvstore.index.feed import Trust
from kvstore.index.index import Answer, Holder, Match
from kvstore.proto import index_pb2 as pb
from kvstore.types import KEY_BYTES
from kvstore.wire.feed import KEYS_MAX
from kvstore.wire.load import EngineEntry, Load

REPLY_BYTES_MAX: Final = 20 << 20
"""Limit of an answer: 4,096 nodes with the largest names and registries."""
TOKENS_MAX: Final = 262_144
NAME_BYTES_MAX: Final = 256
_TRUSTS: Final[dict[Trust | None, pb.Trust]] = {
    None: pb.TRUST_OUT,
    Trust.EXACT: pb.TRUST_EXACT,
    Trust.CATCHING_UP: pb.TRUST_CATCHING_UP,
    Trust.STALE: pb.TRUST_STALE,
}
_OF_TRUST: Final[dict[int, Trust]] = {n: trust for trust, n in _TRUSTS.items() if trust is not None}


def engines_of(rows: Sequence[pb.Engine]) -> tuple[EngineEntry, ...]:
    """Engines of a message, not checked."""
    found = []
    for row in rows:
        its = {name: getattr(row, name) for name in EngineEntry.__struct_fields__}
        found.append(EngineEntry(**its | {"queue": row.queue if row.HasField("queue") else None}))
    return tuple(found)


def engine_rows(engines: Sequence[EngineEntry]) -> list[pb.Engine]:
    """Engines as a message has them."""
    return [pb.Engine(**msgspec.structs.asdict(each)) for each in engines]


def check_match(request: pb.MatchRequest) -> None:
    """Check a question to the index. Raises ProtocolError: it is broken."""
    _check_name(request.tenant)
    if len(request.space) != KEY_BYTES:
        raise ProtocolError(f"a space has {KEY_BYTES} bytes")
    match request.WhichOneof("prompt"):
        case "keys":
            if len(request.keys) % KEY_BYTES or len(request.keys) > KEYS_MAX * KEY_BYTES:
                raise ProtocolError(f"keys are {KEY_BYTES} bytes each, {KEYS_MAX} at most")
        case "tokens":
            tokens = request.tokens
            if not 0 < tokens.block_tokens <= TOKENS_MAX or len(tokens.ids) > TOKENS_MAX:
                raise ProtocolError(f"a block has 1 token or more, a prompt {TOKENS_MAX} at most")
            if len(tokens.ids) // tokens.block_tokens > KEYS_MAX:
                raise ProtocolError(f"a prompt has {KEYS_MAX} blocks at most")
            _check_name(tokens.hash_seed)
            _check_name(tokens.cache_salt)
        case _:
            raise ProtocolError("name a prompt: its keys, or its tokens")


def _check_name(text: str) -> None:
    if len(text) > NAME_BYTES_MAX:
        raise ProtocolError(f"a name is longer than {NAME_BYTES_MAX}")


def reply_of(answer: Answer, *, blocks: int) -> pb.MatchReply:
    """An answer as a message."""
    holders = [
        pb.Holder(
            **msgspec.structs.asdict(match.holder),
            hbm_blocks=match.hbm_blocks,
            dram_blocks=match.dram_blocks,
            file_blocks=match.file_blocks,
            trust=_TRUSTS[match.trust],
        )
        for match in answer.matches
    ]
    return pb.MatchReply(trust=_TRUSTS[answer.trust], holders=holders, blocks=blocks)


def answer_of(reply: pb.MatchReply) -> Answer:
    """The answer in a message. An unknown trust counts as the lowest."""
    matches = [
        Match(
            Holder(each.node, each.engine, each.rank),
            each.hbm_blocks,
            each.dram_blocks,
            each.file_blocks,
            _OF_TRUST.get(each.trust, Trust.STALE),
        )
        for each in reply.holders
    ]
    return Answer(_OF_TRUST.get(reply.trust, Trust.STALE), matches)


def load_message(load: Load) -> pb.Load:
    """A load as a message."""
    return pb.Load(**msgspec.structs.asdict(load))


def load_of(message: pb.Node) -> Load | None:
    """The load in a message, if there is one."""
    if not message.HasField("load"):
        return None
    told = message.load
    return Load(**{name: getattr(told, name) for name in Load.__struct_fields__})


def trust_number(trust: Trust | None) -> pb.Trust:
    """A trust as messages have it; None: out."""
    return _TRUSTS[trust]


def trust_of(number: int) -> Trust | None:
    """The trust in a message; None: out, or unknown."""
    return _OF_TRUST.get(number)
