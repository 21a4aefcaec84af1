"""The work of `kvstore inspect`, `explain` and `top` after their flags are read: ask, and print.

Separate from the commands, because it imports gRPC, tables and the types of rows.
Does not cover: queries and layout (`ask`, `prefix`, `tell`, `top`).
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import click
from rich.console import Group, RenderableType
from rich.text import Text

from kvstore.cli import prefix, tell
from kvstore.cli.ask import OPTIONAL, SUMMARY, WITH_NODES, console, show
from kvstore.cli.commands import as_json, fail, index_client, node_client
from kvstore.cli.top import AllNodes, OneNode, Tally, TopSource, TopView, one_view
from kvstore.cli.top_routers import RouterFigures, RouterPages, RouterTally
from kvstore.cli.top_routers_view import routers_page
from kvstore.cli.top_screen import Draw, watch
from kvstore.cli.top_view import page
from kvstore.config.defaults import BLOCK_ROWS_MAX, BLOCKS_LISTED, REQUEST_ROWS_MAX, REQUESTS_LISTED
from kvstore.config.engine_sources import DEFAULT_TENANT
from kvstore.config.settings import AskSettings
from kvstore.engine import HashingReport, RangeReport, RequestReport
from kvstore.errors import ConfigError
from kvstore.index.feed import Trust
from kvstore.proto import inspect_pb2 as pb
from kvstore.proto.rows import INDEX_IS_STALE, TOPICS, Row, member_report

_NO_NODE_HINT: Final = (
    "keys are computed with the settings of the engines at --socket; no node is needed with"
    " --keys-file and all 64 digits of --space"
)
_P = TypeVar("_P", prefix.PrefixReport, prefix.ClusterPrefix)


def inspect_members(asked: AskSettings, *, json_: bool) -> None:
    """The nodes of the cluster, by an index."""
    with index_client(asked) as client:
        known = client.nodes()
    rows: list[Row] = [member_report(member, known.trust) for member in known.nodes]
    if json_:
        click.echo(as_json(members=rows, index=known.trust.word))
        return
    if known.trust is Trust.STALE:
        click.echo(INDEX_IS_STALE)
    show({"members": rows})
    if known.trust is Trust.CATCHING_UP:
        click.echo(f"the index is {known.trust.word}: there may be more", err=True)


def inspect_node(
    socket: Path, topic: str | None, *, limit: int | None, space: str | None, json_: bool
) -> None:
    """State of one node. `topic` None: everything but single blocks."""
    both = {"tiers": ("tiers", "quotas"), "nodes": WITH_NODES}
    topics = SUMMARY if topic is None else both.get(topic, (topic,))
    shown = limit or BLOCKS_LISTED
    with node_client(socket) as client:
        asked = pb.Filter(limit=shown + 1, space=space or "")
        found = {name: client.rows(name, TOPICS[name], asked) for name in topics}
    found = {name: rows for name, rows in found.items() if rows or name not in OPTIONAL}
    left_out = len(found.get("blocks", ())) > shown
    if left_out:
        found["blocks"] = found["blocks"][:shown]
    if json_:
        click.echo(as_json(**found))
        return
    show(found)
    if left_out:
        hint = f": --limit shows up to {BLOCK_ROWS_MAX}" if shown < BLOCK_ROWS_MAX else ""
        click.echo(f"more than these {shown} blocks exist{hint}", err=True)


def inspect_prefix(
    socket: Path,
    asked: AskSettings | None,
    *,
    space: str,
    json_: bool,
    tenant: str | None,
    tokens_file: Path | None,
    keys_file: Path | None,
    text: str | None,
    tokenizer: str | None,
    cache_salt: str | None,
) -> None:
    """Locations of the blocks of one prompt. `asked` None: on the node of `socket` only."""
    if sum(given is not None for given in (tokens_file, keys_file, text)) != 1:
        raise click.UsageError(
            "name one prompt: --tokens-file FILE, --keys-file FILE or --text TEXT"
        )
    if (text is None) != (tokenizer is None):
        raise click.UsageError("--text and --tokenizer go together")
    if keys_file is not None and cache_salt is not None:
        raise click.UsageError("--cache-salt is in the keys already: leave it out")
    keys = prefix.read_keys(keys_file) if keys_file is not None else []
    tokens = prefix.read_tokens(tokens_file) if tokens_file is not None else []
    if text is not None:
        assert tokenizer is not None
        tokens = prefix.tokenize(text, tokenizer)
    if asked is not None and keys and prefix.is_whole(space):
        hashing = prefix.hashing_of_keys(space, tenant or DEFAULT_TENANT)
        prompt = prefix.prompt_of_keys(keys, hashing)
    else:
        with node_client(socket, hint=_NO_NODE_HINT if asked is not None else "") as client:
            known = client.rows("hashings", HashingReport)
            hashing = prefix.choose(known, space=space, tenant=tenant or "")
            if keys:
                prompt = prefix.prompt_of_keys(keys, hashing)
            else:
                prompt = prefix.prompt_of_tokens(tokens, hashing, cache_salt=cache_salt or "")
            if asked is None:
                _print(prefix.look_up(client, prompt, hashing), tell.show_prefix, json_=json_)
                return
    assert asked is not None
    with index_client(asked) as index:
        try:
            found = prefix.look_up_everywhere(index, prompt, hashing)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    _print(found, tell.show_cluster_prefix, json_=json_)


def _print(found: _P, show_it: Callable[[_P], None], *, json_: bool) -> None:
    if json_:
        click.echo(as_json(prefix=tell.prefix_as_dict(found)))
    else:
        show_it(found)


def explain_request(socket: Path, request_id: str | None, last: int | None, *, json_: bool) -> None:
    """Why one request hit or missed, or a list of the latest."""
    limit = REQUEST_ROWS_MAX if request_id is not None else last or REQUESTS_LISTED
    with node_client(socket) as client:
        question = pb.Filter(request=request_id or "", limit=limit)
        found = client.rows("requests", RequestReport, question)
        one = request_id is not None and len(found) == 1
        wanted = found if one or (json_ and request_id is not None) else []
        ranges = [client.rows("ranges", RangeReport, pb.Filter(number=r.number)) for r in wanted]
    if request_id is not None and not found:
        fail(
            f"the node has no record of a request with the id {request_id!r}: it may still be"
            " running, or be too old; 'kvstore explain' lists the latest",
            code=1,
        )
    if json_:
        stories = itertools.zip_longest(found, ranges)  # no ranges: nobody asked for them
        click.echo(as_json(requests=[tell.story_as_dict(*story) for story in stories]))
    elif one:
        tell.show_story(found[0], ranges[0])
    elif found:
        tell.show_stories(found)
        if request_id is not None:
            click.echo(f"{len(found)} requests fit {request_id!r}: give one of these ids")
    else:
        click.echo("no request has ended since the node started")


def watch_load(
    socket: Path | None,
    asked: AskSettings | None,
    routers: Sequence[str],
    router_ca: Path | None,
    interval_s: float,
    *,
    once: bool,
    json_: bool,
) -> None:
    """Load of nodes and of routers, once or until q. `asked` None: the node at `socket`, if any."""
    out = console()
    with contextlib.ExitStack() as stack:
        source: TopSource | None = OneNode(socket) if socket is not None else None
        if asked is not None:
            source = AllNodes(
                stack.enter_context(index_client(asked)), ", ".join(asked.index or [])
            )
        pages = RouterPages(routers, router_ca)
        stack.callback(pages.close)
        if source is not None:
            source.sample()  # what was never there is not silent, it is a wrong flag
        if not once:
            watch(_drawn(source, pages, interval_s), out, interval_s=interval_s)
            return
        tally, found, wait = RouterTally(), {}, threading.Event().wait
        tally.take(pages.sample())
        view = TopView([], "")
        if source is not None:
            view = one_view(source, wait, interval_s=interval_s)
            found = {"nodes": view.figures, "trouble": view.trouble}
        else:
            wait(interval_s)
        seen = tally.take(pages.sample())
        if json_:
            click.echo(as_json(**found, **({"routers": seen} if seen else {})))
        else:
            drawn = _both(source, view, seen, _name(source, pages), width=out.width)
            out.print(drawn)
    if source is None and not tally.has_answers:
        sys.exit(1)


def _drawn(source: TopSource | None, pages: RouterPages, interval_s: float) -> Draw:
    tally, routers = Tally(), RouterTally()

    def draw(width: int, height: int) -> RenderableType:
        figures = tally.ask(source) if source is not None else []
        head = f"{_name(source, pages)}, every {interval_s:g} s, q leaves"
        view = TopView(figures, tally.trouble)
        return _both(source, view, routers.take(pages.sample()), head, width=width, height=height)

    return draw


def _name(source: TopSource | None, pages: RouterPages) -> str:
    count = len(pages.urls)
    routers = f"{count} router{'s' if count > 1 else ''}" if count else ""
    return "kvstore top " + " and ".join(filter(None, (source.name if source else "", routers)))


def _both(
    source: TopSource | None,
    view: TopView,
    routers: Sequence[RouterFigures],
    head: str,
    *,
    width: int,
    height: int | None = None,
) -> RenderableType:
    """Nodes, if there is a source of them, above routers."""
    if source is None:
        left = None if height is None else height - 1
        lines = routers_page(routers, width=width, height=left)
        return Group(Text(head[:width], style="bold"), *lines)
    most = None if height is None else height // 2
    lines = routers_page(routers, width=width, height=most) if routers else []
    left = None if height is None else height - len(lines)
    nodes = page(view.figures, head=head, trouble=view.trouble, width=width, height=left)
    return Group(nodes, *lines)
