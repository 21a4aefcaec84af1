"""Questions to the index and its answers, as messages to and from the values of its core: checked
here, once, at the door.

Does not cover: messages of a feed (`wire.feed`), rows of `inspect` (`rows`).

Ways for a question to be broken, each a ProtocolError: a space or keys of another length than 32
bytes each; no prompt; more keys or tokens than fit a question; a name that is too long.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kvstore.errors import ProtocolError
from kvstore.index.feed import Holder, Trust
from kvstore.index.index import Answer, Match, Member
from kvstore.proto import index_pb2 as pb
from kvstore.types import KEY_BYTES, Incarnation
from kvstore.wire.feed import KEYS_MAX
from kvstore.wire.load import EngineEntry, Load

REPLY_BYTES_MAX: Final = 20 << 20
"""Limit of an answer: 4,096 nodes with the largest names and registries."""
TOKENS_MAX: Final = 262_144
NAME_BYTES_MAX: Final = 256
TRUSTS: Final[dict[Trust | None, pb.Trust]] = {
    None: pb.TRUST_OUT,
    Trust.EXACT: pb.TRUST_EXACT,
    Trust.CATCHING_UP: pb.TRUST_CATCHING_UP,
    Trust.STALE: pb.TRUST_STALE,
}
_OF_TRUST: Final[dict[int, Trust]] = {n: trust for trust, n in TRUSTS.items() if trust is not None}


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


def trust_of(number: int) -> Trust:
    """Trust in an answer; an unknown one counts as the lowest."""
    return _OF_TRUST.get(number, Trust.STALE)


def reply_of(answer: Answer, *, blocks: int) -> pb.MatchReply:
    """An answer as a message."""
    holders = [
        pb.Holder(
            **msgspec.structs.asdict(match.holder),
            hbm_blocks=match.hbm_blocks,
            dram_blocks=match.dram_blocks,
            file_blocks=match.file_blocks,
            trust=TRUSTS[match.trust],
        )
        for match in answer.matches
    ]
    return pb.MatchReply(trust=TRUSTS[answer.trust], holders=holders, blocks=blocks)


def answer_of(reply: pb.MatchReply) -> Answer:
    """The answer in a message."""
    matches = [
        Match(
            Holder(each.node, each.engine, each.rank),
            each.hbm_blocks,
            each.dram_blocks,
            each.file_blocks,
            trust_of(each.trust),
        )
        for each in reply.holders
    ]
    return Answer(trust_of(reply.trust), matches)


def node_row(member: Member, *, engines: bool) -> pb.Node:
    """A node as a message. `engines`: with the engines that it serves."""
    return pb.Node(
        node=member.node,
        incarnation=member.incarnation,
        address=member.address,
        trust=TRUSTS[member.trust],
        sequence=member.sequence,
        load=None if member.load is None else pb.Load(**msgspec.structs.asdict(member.load)),
        engines=[pb.Engine(**msgspec.structs.asdict(each)) for each in member.engines if engines],
    )


def member_of(row: pb.Node) -> Member:
    """The node in a message; load and engines are not checked. An unknown trust counts as out."""
    return Member(
        row.node,
        Incarnation(row.incarnation),
        row.address,
        _OF_TRUST.get(row.trust),
        row.sequence,
        Load(**_fields(Load, row.load)) if row.HasField("load") else None,
        tuple(
            EngineEntry(
                **_fields(EngineEntry, each)
                | {"queue": each.queue if each.HasField("queue") else None}
            )
            for each in row.engines
        ),
    )


def _fields(kind: type[msgspec.Struct], message: object) -> dict[str, Any]:
    return {name: getattr(message, name) for name in kind.__struct_fields__}
