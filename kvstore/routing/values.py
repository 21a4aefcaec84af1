"""Requests, prefixes and workers, as the shell describes them to the core.

Covers: values without behaviour. Prompt text and token ids never come here: lengths and keys do.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Mapping
from typing import Final

import msgspec

from kvstore.index.index import Answer
from kvstore.types import KEY_BYTES


class WorkerRole(enum.StrEnum):
    """Legs of a request that a worker serves."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"
    ANY = "any"
    """As the planner says: `prefill` or `both`."""


class PrefixTrust(enum.StrEnum):
    """Trust in prefix lengths, by their source. `costs.TRUSTED` has the weight of each. The first
    three are those of the index (`index.feed.Trust`), in its order.
    """

    EXACT = "exact"
    CATCHING_UP = "catching-up"
    STALE = "stale"
    APPROXIMATE = "approximate"
    """From `tree`: the index has no answer, or the engine publishes none."""
    NONE = "none"
    """No source at all: routed by load."""


class ProbeResult(enum.StrEnum):
    """Result of a probe."""

    ANSWERED = "answered"
    """The engine answered 2xx, however late."""
    LATE = "late"
    """No answer yet: the engine may be busy. The probe goes on."""
    REFUSED = "refused"
    """Nothing listens there: the engine's process is gone."""
    UNWELL = "unwell"
    """An answer that is not 2xx."""
    SILENT = "silent"
    """Neither an answer nor a byte of any response for the whole limit of silence."""


class WorkerWord(enum.StrEnum):
    """State of a worker, in one word for operators."""

    NEW = "new"
    """Never reached yet."""
    UP = "up"
    LATE = "late"
    """Its last probe was late: the lateness is part of its cost."""
    OPEN = "open"
    """Its requests failed: it gets one at a time, until one succeeds."""
    HALF_OPEN = "half-open"
    """The breaker is open, and one request is under way as a trial."""
    DOWN = "down"
    """The engine refuses connections, says that it is unwell, or is silent."""
    DRAINING = "draining"
    """Finishes its requests and gets no new ones: the policy says so, or it terminates."""


STEP_TOKENS: Final = 128
"""With shorter blocks, one key in so many tokens is remembered; as keys are chained, it stands for
those before it.
"""


class PrefixAnswer(Answer, frozen=True):
    """Answer of the index about the keys of a request. None in place of it: no answer in time.

    A match with an engine: the memory of that engine (hbm). Without one: the tiers of a node, which
    its own engines load and other nodes fetch.
    """

    epoch: int = 0
    """Version of the index, for the receipt."""
    peers: frozenset[str] | None = None
    """Nodes that fetch blocks from each other; None: all."""


class Prefix(msgspec.Struct, frozen=True):
    """Facts about a prompt: its length, keys, and the index's answer."""

    prompt_tokens: int
    """Estimated where there is no rendering."""
    keys: bytes = b""
    """32 bytes each, of the full blocks, in chain order; empty: no prefix routing by keys."""
    block_tokens: int = 16
    """Tokens of a block, which has one key."""
    answer: PrefixAnswer | None = None
    """Answer of the index; None: there was none in time, or it was not asked."""
    load_only: dict[str, str] = {}
    """Worker → why its prefixes are not known for this prompt's adapter."""
    parts: tuple[int, ...] = ()
    """Number of keys of each prompt, if there are several, whose chains follow each other in
    `keys`; empty: one prompt.
    """
    text_bytes: int = 0
    """Bytes of text by which the tokens are estimated, and of which the keys are: nobody rendered
    the prompt; 0: the tokens are counted.
    """
    media: Mapping[str, int] = {}
    """Number of images, audio or video by kind."""


class RouteRequest(Prefix, frozen=True, kw_only=True):
    """One request, after rendering."""

    request_id: str
    """Unique among the requests under way."""
    model: str
    """Model as the client wrote it: name, alias or adapter."""
    output_tokens_max: int | None = None
    """Most output tokens that the client wants; None: it gave no limit."""
    is_streamed: bool = True
    """False: the response comes whole, and its first byte says nothing about its first token."""
    tenant: str = ""
    service: str = ""
    """Class of service; empty: the policy's default."""
    session: str = ""
    """Conversation: stays on its side of an A/B split (`ahead`); the key of policy `session`."""
    priority: int = 0
    """Within the class of service, lower is first, as in vLLM."""
    subset: tuple[str, ...] | None = None
    """Workers (or addresses) that may be chosen; None: all. An Envoy subset hint."""
    has_side_effects: bool = True
    """False: two workers may race for it without harm."""
    pin_s: float = 0.0
    """Seconds for which the client wants its prompt's blocks kept; 0: no pin; negative: the client
    gave no valid number.
    """
    ends_session: bool = False
    """The client says that no request of the session follows."""
    is_bound_to_one: bool = False
    """The request names a stored response that one worker keeps, and it is not known which: all may
    be asked.
    """
    must_be_local: bool = False
    """No remote prefill: the engine or the request does not allow it."""

    @property
    def key_step(self) -> int:
        """One key in so many is remembered in the tree. All are if keys are of bytes: then
        `block_tokens` is an estimate, which changes.
        """
        return 1 if self.text_bytes else max(1, STEP_TOKENS // self.block_tokens)

    @property
    def chains(self) -> list[bytes]:
        """Keys of each prompt."""
        if not self.parts:
            return [self.keys]
        ends = itertools.accumulate(count * KEY_BYTES for count in self.parts)
        return [self.keys[a:b] for a, b in itertools.pairwise((0, *ends))]


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a worker that the core takes from its source unchanged."""

    url: str = ""
    """Base URL of the engine, by which routers exchange its load."""
    pool: str = "default"
    models: tuple[str, ...] = ()
    """Base models that it serves; empty: any."""
    role: WorkerRole = WorkerRole.BOTH
    node: str = ""
    """Name of the kvstore node beside it; empty: none."""
    engine: str = ""
    """Name of the engine in the index; empty: not followed."""
    rank: int = 0
    is_terminating: bool = False
    """Finishes its requests, and gets new ones where no other worker can take them."""


class WorkerSpec(WorkerFacts, frozen=True, kw_only=True):
    """A worker: one engine with one HTTP address, data-parallel ranks each by itself."""

    worker: str
    """Unique name, in receipts and metrics."""
    address: str
    """Host and port, or a URL."""
    takes_any_model: bool = False
    """Its engine serves its model by names that no worker lists, too."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters that it serves."""
    memory_tokens: int = 0
    """Tokens that its KV cache holds; 0: not known, never filtered by memory."""
    context_tokens: dict[str, int] = {}
    """Model → longest prompt with its output; not named: not known."""
    is_red: bool = False
    """Its engine's keys of a probe prompt differ from the router's, or were not compared yet: it is
    chosen by load only.
    """

    @property
    def is_followed(self) -> bool:
        """Whether the index follows its engine or node."""
        return bool(self.engine or self.node)

    def context_of(self, model: str) -> float:
        """Longest prompt with its output of a model, in tokens; infinite if it is not known."""
        return self.context_tokens.get(model, math.inf)


class LoadSample(msgspec.Struct, frozen=True, kw_only=True):
    """Scraped numbers of a worker. None: the engine does not say."""

    waiting: int | None = None
    running: int | None = None
    memory_used: float | None = None
    """Share of the KV cache in use, 0 to 1."""
    adapters: tuple[str, ...] | None = None
