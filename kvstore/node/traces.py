"""Spans of a request at this node, made from its story and the results of its lookups.

    kvstore.request         arrival at the engine until its end; one event for each range of blocks
      ├─ kvstore.push       a prefill node sent blocks, before the lookup
      ├─ kvstore.lookup     question to the node until its answer
      ├─ kvstore.promotion  waited for blocks from disk or another node
      ├─ kvstore.fetch      another node was read, beside the others
      └─ kvstore.load       copies into the engine's cache

Above them is the span of the request's `traceparent`, such as a router's, or none. Values are those
of `kvstore explain`: counts, times, names of models, tenants and nodes. Does not cover: export
(`kvstore.obs.traces`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from opentelemetry.sdk.trace import Event, ReadableSpan

from kvstore.engine.events import StoryTold
from kvstore.engine.why.findings import RangeReport
from kvstore.obs.reasons import word
from kvstore.obs.traces import Attributes, Traces, new_span_id
from kvstore.units import NS_PER_US

EVENTS_MAX: Final = 64


class NodeTraces(Traces[StoryTold]):
    """Spans of one node."""

    service = "kvstore-node"

    def make(self, ended: StoryTold) -> list[ReadableSpan]:
        row, story, own = ended.row, ended.story, new_span_id()
        parent = self.parent(story.traceparent)
        if not parent.is_sampled:
            return []
        end_ns = ended.ended_ns + time.time_ns() - time.monotonic_ns()
        begin_ns = end_ns - story.total_ns
        attributes = {
            "gen_ai.request.id": row.request,
            "gen_ai.request.model": row.label,
            "gen_ai.usage.input_tokens": story.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": story.local_tokens + story.loaded_tokens,
            "kvstore.engine": row.engine_id,
            "kvstore.tenant": row.tenant,
        }
        if row.outcome:
            attributes["kvstore.miss.reason"] = word(row.outcome)
        events = [Event("kvstore.range", _range(r), begin_ns) for r in ended.ranges[:EVENTS_MAX]]
        times = begin_ns, end_ns
        spans = [self.span("kvstore.request", parent, own, times, attributes, events)]
        parent = parent._replace(span_id=own)
        for name, since_ns, took_ns, its in _steps(ended):
            # Engine and node have one clock, but messages between them take time.
            ends = (min(max(0, at), story.total_ns) for at in (since_ns, since_ns + took_ns))
            times = begin_ns + next(ends), begin_ns + next(ends)
            spans.append(self.span(f"kvstore.{name}", parent, new_span_id(), times, its))
        return spans


def _steps(ended: StoryTold) -> Iterator[tuple[str, int, int, Attributes]]:
    """(name, begin since the request's arrival, duration, attributes) of each step; times in ns."""
    story, row = ended.story, ended.row
    for push in row.pushes:
        if push.side == "decode":  # expected since its arrival
            yield "push", 0, push.ended_us * NS_PER_US, _from_node(push.node, push.pushed)
    searches = {each.search.number: each.search for each in ended.ranges if each.search is not None}
    for each in searches.values():
        if each.begun_ns:
            took_ns = (each.ended_ns or ended.ended_ns) - each.begun_ns
            since_ns = each.begun_ns - ended.ended_ns + story.total_ns
            yield "fetch", since_ns, took_ns, _from_node(each.node, each.fetched)
    answered_ns = story.queued_ns + story.lookup_ns
    tokens = {"file": story.file_tokens, "peer": story.peer_tokens}
    if story.lookup_ns:
        yield "lookup", story.queued_ns, story.lookup_ns, {}
    if story.promotion_ns:
        yield "promotion", answered_ns, story.promotion_ns, _moved(ended, tokens)
    if story.load_ns:
        tokens["dram"] = story.loaded_tokens - sum(tokens.values())
        yield "load", story.admitted_ns, story.load_ns, _moved(ended, tokens)


def _from_node(node: str, blocks: int) -> Attributes:
    return {"kvstore.tier": "peer", "kvstore.peer": node, "kvstore.blocks": blocks}


def _moved(ended: StoryTold, tokens: dict[str, int]) -> Attributes:
    """Attributes of a step that moved `tokens`, given by the tier that they came from."""
    blocks = sum(tokens.values()) // max(ended.row.block_tokens, 1)
    return {
        "kvstore.tier": ",".join(sorted(tier for tier, count in tokens.items() if count)),
        "kvstore.blocks": blocks,
        "kvstore.bytes": blocks * ended.block_bytes,
    }


def _range(row: RangeReport) -> Attributes:
    texts = {"tier": row.tier, "peer": row.node, "miss.reason": word(row.reason)}
    counts = {"first_block": row.first_block, "blocks": row.blocks}
    return {f"kvstore.{name}": value for name, value in (counts | texts).items() if value != ""}
