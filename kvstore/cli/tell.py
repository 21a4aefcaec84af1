"""Output of `kvstore explain` and `kvstore inspect prefix`: facts, then a table of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.text import Text

from kvstore.cli.ask import console, printable, table
from kvstore.cli.prefix import ClusterPrefix, PrefixReport
from kvstore.cli.reasons import (
    of_pushes,
    of_range,
    of_request,
    range_as_dict,
    request_as_dict,
    word,
)
from kvstore.engine import RangeReport, RequestReport
from kvstore.index.feed import Trust
from kvstore.proto.rows import INDEX_IS_STALE

_TRUSTS: Final = {
    "exact": "exact: no other node holds the first block",
    "catching-up": "catching-up: updates are still missing, other nodes may hold some too",
    "stale": INDEX_IS_STALE,
}


def prefix_as_dict(prefix: PrefixReport | ClusterPrefix) -> dict[str, Any]:
    """For programs."""
    row = msgspec.structs.asdict(prefix)
    if isinstance(prefix, PrefixReport):
        row["ranges"] = [range_as_dict(each, None) for each in prefix.ranges]
    return row


def story_as_dict(request: RequestReport, ranges: Sequence[RangeReport] | None) -> dict[str, Any]:
    """For programs; `ranges` None: not asked for."""
    row = request_as_dict(request)
    if ranges is not None:
        row["ranges"] = [range_as_dict(each, request) for each in ranges]
    return row


def show_story(request: RequestReport, ranges: Sequence[RangeReport]) -> None:
    """One request, to stdout."""
    out = console()
    engine = f"{request.engine_id} ({request.label})" if request.label else request.engine_id
    lines = {
        "request": request.request,
        "engine": f"{engine}, tenant {request.tenant}, space {request.space}",
        "ended": f"{request.ended_ms_ago / 1000:.1f} s ago",
        "prompt": _prompt(request),
        "outcome": f"{word(request.outcome)}: {of_request(request)}"
        if request.outcome
        else "loaded",
        "times": _times(request),
        "stored": f"{request.stored_blocks} blocks of it are stored, or were already",
    }
    if pushed := of_pushes(request):
        lines["pushed"] = pushed
    _facts(out, lines)
    _blocks(out, ranges, request.block_tokens, request.prompt_tokens, request)


def show_stories(requests: Sequence[RequestReport]) -> None:
    """One line a request, newest first."""
    numbers = ("ended", "prompt", "own", "loaded", "from disk", "lookup")
    made = table(("request", *numbers, "outcome"), numbers=numbers)
    for row in requests:
        cells = (
            row.request,
            f"{row.ended_ms_ago / 1000:.1f} s ago",
            row.prompt_tokens,
            row.local_tokens,
            row.loaded_tokens,
            row.file_tokens,
            _ms(row.lookup_us),
            word(row.outcome) or "loaded",
        )
        made.add_row(*(printable(str(cell)) for cell in cells))
    console().print(made)


def show_prefix(prefix: PrefixReport) -> None:
    """Locations of a prompt's blocks on one node, to stdout."""
    out = console()
    space = f"{prefix.space} ({prefix.label})" if prefix.label else prefix.space
    lines = {
        "space": f"{space}, tenant {prefix.tenant}",
        "prompt": f"{prefix.prompt_tokens} tokens, of which a request would find "
        f"{prefix.held_tokens}",
    }
    if prefix.engines:
        lines["hbm"] = ", ".join(
            f"{row.blocks} blocks in engine {row.engine} rank {row.rank}" for row in prefix.engines
        )
    _facts(out, lines)
    _blocks(out, prefix.ranges, prefix.block_tokens, prefix.prompt_tokens, None)


def show_cluster_prefix(prefix: ClusterPrefix) -> None:
    """Locations of a prompt's blocks, each with its prefix length, to stdout."""
    out, size = console(), prefix.block_tokens
    space = f"{prefix.space} ({prefix.label})" if prefix.label else prefix.space
    prompt = f"{prefix.asked_blocks} blocks asked for; at most {prefix.held_blocks} of them"
    if size is not None:
        prompt = f"{prefix.prompt_tokens} tokens, {prefix.asked_blocks} blocks of {size} asked for"
        prompt += f"; at most {prefix.held_tokens} of them"
    is_known = prefix.holders or prefix.trust != Trust.STALE.word
    lines = {
        "space": f"{space}, tenant {prefix.tenant}",
        "prompt": f"{prompt} at one location" if is_known else prompt.partition(";")[0],
        "index": _TRUSTS.get(prefix.trust, prefix.trust),
    }
    _facts(out, lines)
    if not prefix.holders:
        nobody = "no node holds the first block"
        out.print(Text(nobody if is_known else "not known: the index is stale", style="dim"))
        return
    numbers = ("gpu", "dram", "disk")
    title = "blocks from the first on, in this tier or a faster one"
    made = table(("node", "engine", "trust", *numbers), numbers=numbers, title=title)
    for row in prefix.holders:
        engine = f"{row.engine} rank {row.rank}" if row.engine else "-"
        counts = map(str, (row.hbm_blocks, row.dram_blocks, row.file_blocks))
        made.add_row(*map(printable, (row.node, engine, row.trust, *counts)))
    out.print(made)


def _facts(out: Console, lines: dict[str, str]) -> None:
    for name, text in lines.items():
        out.print(Text(f"{name:<9}", style="bold") + printable(text), soft_wrap=True)
    out.print()


def _prompt(request: RequestReport) -> str:
    loaded = f"{request.loaded_tokens} loaded"
    if request.loaded_tokens:
        dram = request.loaded_tokens - request.file_tokens - request.peer_tokens
        loaded += f" ({dram} from dram, {request.file_tokens} from disk"
        loaded += f", {request.peer_tokens} from other nodes)" if request.peer_tokens else ")"
    computed = max(0, request.prompt_tokens - request.local_tokens - request.loaded_tokens)
    return (
        f"{request.prompt_tokens} tokens: {request.local_tokens} in the engine's own cache, "
        f"{loaded}, {computed} computed"
    )


def _times(request: RequestReport) -> str:
    return (
        f"queued {_ms(request.queued_us)}, lookup {_ms(request.lookup_us)}, "
        f"waited for blocks {_ms(request.promotion_us)}, load {_ms(request.load_us)}"
        + f", first token {_ms(request.first_token_us)}"
        * bool(request.first_token_us)
    )


def _ms(us: int) -> str:
    return f"{us / 1000:.1f} ms"


def _blocks(
    out: Console,
    ranges: Sequence[RangeReport],
    block_tokens: int,
    prompt_tokens: int,
    request: RequestReport | None,
) -> None:
    has_nodes = any(row.node for row in ranges)
    made = table(("blocks", "tokens", "tier", *(["node"] if has_nodes else []), "missed", "why"))
    end = 0
    for row in ranges:
        end = row.first_block + row.blocks
        tokens = _from_to(row.first_block * block_tokens, end * block_tokens)
        node = [row.node or "-"] if has_nodes else []
        cells = (_from_to(row.first_block, end), tokens, row.tier or "-", *node)
        why = (word(row.reason) or "-", of_range(row, request))
        made.add_row(*(printable(cell) for cell in (*cells, *why)))
    if end * block_tokens < prompt_tokens:
        tokens = _from_to(end * block_tokens, prompt_tokens)
        node = ["-"] if has_nodes else []
        full = "a block that is not full is never stored"
        made.add_row("-", tokens, "-", *node, "no full block", full)
    out.print(made)


def _from_to(begin: int, end: int) -> str:
    return str(begin) if end == begin + 1 else f"{begin}-{end - 1}"
