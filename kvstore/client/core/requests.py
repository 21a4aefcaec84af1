"""A request under way, and its story once it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstore.client.core.hits import Outcome, PromptKeys
from kvstore.client.core.lookup import Lookup
from kvstore.client.core.stores import StoreProgress
from kvstore.wire.messages import REQUEST_BYTES_MAX, Story

DETAIL_LENGTH_MAX: Final = 255


class TrackedRequest:
    """State only; `SchedulerCore` changes it."""

    __slots__ = (
        "answer",
        "answered_ns",
        "arrived_ns",
        "file_tokens",
        "finished",
        "first_token_ns",
        "load_ns",
        "loaded_tokens",
        "local_tokens",
        "lookup",
        "peer_tokens",
        "progress",
        "prompt_tokens",
        "tail",
        "transfer",
    )

    def __init__(
        self, prompt_tokens: int, lookup: Lookup, progress: StoreProgress, transfer: str = ""
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.progress = progress
        self.lookup = lookup
        self.local_tokens = 0
        self.loaded_tokens = 0
        self.file_tokens = 0
        self.peer_tokens = 0
        self.answer: Outcome | None = None
        self.transfer = transfer
        self.tail = b""
        """Key of the prompt's tail, where it is stored or looked up; empty: it is not."""
        self.arrived_ns = 0
        self.first_token_ns = 0
        """When the engine was first seen to have a token of its answer; 0: not yet."""
        self.answered_ns = 0
        """First answer after the last question to the node."""
        self.load_ns: dict[int, int] = {}
        """Time of its copies, by rank."""
        self.finished = False

    def prompt_keys(self, keys: Sequence[bytes], block_tokens: int) -> Sequence[bytes]:
        """With that of the tail."""
        return PromptKeys(keys, self.prompt_tokens // block_tokens, self.tail)

    def sought(self, keys: Sequence[bytes], block_tokens: int) -> Sequence[bytes]:
        """Keys that are looked up: with the tail on a decode engine, until the request's answer
        has made a whole block of it. A prefill engine computes one token in any case."""
        is_whole = len(keys) > self.prompt_tokens // block_tokens
        if is_whole or not self.tail or self.progress.tail_tokens:
            return keys
        return self.prompt_keys(keys, block_tokens)

    def cut_load(self, tokens: int) -> None:
        """No more than so many tokens were loaded."""
        self.loaded_tokens = min(self.loaded_tokens, tokens)
        self.file_tokens = min(self.file_tokens, self.loaded_tokens)
        self.peer_tokens = min(self.peer_tokens, self.loaded_tokens - self.file_tokens)


def story_of(request: str, entry: TrackedRequest, saved_ns: int) -> Story:
    """The story of a request that has ended, whose load saved so much computing."""
    lookup = entry.lookup
    asked, answered, replied = lookup.asked_at_ns, entry.answered_ns, lookup.replied_at_ns
    reason = lookup.miss_reason
    if not entry.answered_ns:
        reason = "not asked"
    return Story(
        request=cut_name(request),
        prompt_tokens=entry.prompt_tokens,
        local_tokens=entry.local_tokens,
        loaded_tokens=entry.loaded_tokens,
        file_tokens=entry.file_tokens,
        peer_tokens=entry.peer_tokens,
        outcome=reason,
        detail=lookup.detail[:DETAIL_LENGTH_MAX],
        session=lookup.session,
        leases=lookup.asked_leases,
        first_block=lookup.first_block,
        queued_ns=max(0, (asked or answered) - entry.arrived_ns),
        lookup_ns=max(0, (replied or answered) - asked) if asked else 0,
        promotion_ns=max(0, answered - replied) if lookup.waited else 0,
        load_ns=max(entry.load_ns.values(), default=0),
        saved_ns=saved_ns,
        stored_blocks=entry.progress.next_blocks[0],
        first_token_ns=max(0, entry.first_token_ns - entry.arrived_ns),
        transfer=entry.transfer,
    )


def cut_name(request: str) -> str:
    """A request's id as it may travel: users choose theirs."""
    return request.encode("utf-8", "replace")[:REQUEST_BYTES_MAX].decode("utf-8", "ignore") or "?"
