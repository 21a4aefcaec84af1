"""`kvstore inspect`, `kvstore explain` and `kvstore top`: flags to questions, answers to tables.

Does not cover: what is asked and how it looks (`ask`, `prefix`, `tell`, `top`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from kvstore.engine.explain import HashingReport
from kvstore.errors import AttachError, ConfigError
from kvstore.index.feed import Trust
from kvstore.proto.convert import INDEX_IS_STALE, Row, member_report
from kvstore.serve.ask import OPTIONAL, SUMMARY, TOPICS, as_json, console, show
from kvstore.serve.commands import (
    SOCKET_OPTION,
    IndexFlags,
    asks_index,
    fail,
    index_client,
    index_options,
    node_client,
)
from kvstore.serve.engine_sources import DEFAULT_TENANT
from kvstore.serve.inspect import BLOCK_ROWS_MAX, REQUEST_ROWS_MAX
from kvstore.serve.prefix import (
    ClusterPrefix,
    PrefixReport,
    Prompt,
    choose,
    hashing_of_keys,
    is_whole,
    look_up,
    look_up_everywhere,
    prompt_of_keys,
    prompt_of_tokens,
    read_keys,
    read_tokens,
    tokenize,
)
from kvstore.serve.tell import (
    Story,
    prefix_as_json,
    show_cluster_prefix,
    show_prefix,
    show_stories,
    show_story,
    stories_as_json,
)
from kvstore.serve.top import AllNodes, OneNode, Source, one_view
from kvstore.serve.top_screen import watch
from kvstore.serve.top_view import as_json as figures_as_json
from kvstore.serve.top_view import page

BLOCKS_LISTED: Final = 100
REQUESTS_LISTED: Final = 20
_NO_NODE_HINT: Final = (
    "keys are made as the node at --socket says its engines do; none is needed with --keys-file and"
    " all 64 digits of --space"
)
_P = TypeVar("_P", PrefixReport, ClusterPrefix)


@click.command()
@click.argument("topic", type=click.Choice(TOPICS), required=False, metavar="[TOPIC]")
@SOCKET_OPTION
@click.option("--json", "json_", is_flag=True, help="One JSON object, a list per topic.")
@click.option(
    "--limit",
    type=click.IntRange(1, BLOCK_ROWS_MAX),
    help=f"Most blocks to list.  [default: {BLOCKS_LISTED}]",
)
@index_options
@click.option("--space", metavar="HEX", help="Of blocks or a prefix: this space only.")
@click.option("--tenant", metavar="NAME", help="Of a prefix: this tenant's blocks.")
@click.option(
    "--tokens-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A prompt as token ids: a JSON list, or numbers with spaces.",
)
@click.option(
    "--keys-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A prompt as keys of its blocks: 64 hex digits each.",
)
@click.option("--text", help="A prompt as text; needs --tokenizer.")
@click.option("--tokenizer", metavar="PATH|NAME", help="The model's, as its engine finds it.")
@click.option("--cache-salt", metavar="TEXT", help="Of the request, if it had one.")
def inspect(
    topic: str | None,
    socket: Path,
    limit: int | None,
    space: str | None,
    *,
    json_: bool,
    index: tuple[str, ...],
    ca: str | None,
    cert: str | None,
    key: str | None,
    insecure: bool,
    **prompt: Any,
) -> None:
    """Show what a node holds: everything but single blocks, or one TOPIC.

    \b
    Topics:
      nodes    who is attached, how much is cached; the cluster, by its index; engines' own memory
      tiers    memory: capacity, in use, being written, leased; and quotas, if there are any
      spaces   models: what their engines share
      blocks   single blocks
      leases   what is being read
      jobs     what is being written
      transfers  how long reading from other nodes took, by part and back end
      prefix   where the blocks of one prompt are, or why they are not there
    \b
    With --index, 'nodes' and 'prefix' are about all nodes of the cluster: who is there, and how far
    each of them goes, in which tier. Keys are made as the node at --socket says its engines do:
    no node is needed with --keys-file and all 64 digits of --space (and --tenant).
    \b
    Examples:
      kvstore inspect
      kvstore inspect blocks --space 3f9a --limit 20
      kvstore inspect tiers --json | jq '.tiers[0].used_bytes'
      kvstore inspect prefix --tokens-file prompt.json
      kvstore inspect prefix --text "Once upon" --tokenizer /models/llama --space 3f9a
      kvstore inspect prefix --tokens-file prompt.json --index 10.0.0.1:9470 \\
        --ca pki/ca.crt --cert pki/node-n1.crt --key pki/node-n1.key
      kvstore inspect nodes --index 10.0.0.1:9470 --insecure
    """
    flags = IndexFlags(index=index, ca=ca, cert=cert, key=key, insecure=insecure)
    everywhere = asks_index(flags)
    if everywhere and topic not in ("nodes", "prefix"):
        raise click.UsageError("--index is for 'kvstore inspect nodes' and 'prefix': name one")
    if topic == "prefix":
        if limit is not None:
            raise click.UsageError("--limit chooses blocks: use 'kvstore inspect blocks'")
        chosen = flags if everywhere else None
        _inspect_prefix(socket, chosen, space=space or "", json_=json_, **prompt)
        return
    if any(value is not None for value in prompt.values()):
        raise click.UsageError("a prompt is for 'kvstore inspect prefix'")
    if topic != "blocks" and (limit is not None or space is not None):
        raise click.UsageError("--limit and --space choose blocks: use 'kvstore inspect blocks'")
    if everywhere:
        _inspect_members(flags, json_=json_)
    else:
        _inspect_node(socket, topic, limit=limit, space=space, json_=json_)


def _inspect_members(flags: IndexFlags, *, json_: bool) -> None:
    with index_client(flags) as client:
        known = client.nodes()
    rows: list[Row] = [member_report(member, known.trust) for member in known.nodes]
    if json_:
        click.echo(as_json({"members": rows, "index": known.trust.word}))
        return
    if known.trust is Trust.STALE:
        click.echo(INDEX_IS_STALE)
    show({"members": rows})
    if known.trust is Trust.CATCHING_UP:
        click.echo(f"the index is {known.trust.word}: there may be more", err=True)


def _inspect_node(
    socket: Path, topic: str | None, *, limit: int | None, space: str | None, json_: bool
) -> None:
    both = {"tiers": ("tiers", "quotas"), "nodes": ("nodes", "members", "engines")}
    topics = SUMMARY if topic is None else both.get(topic, (topic,))
    shown = limit or BLOCKS_LISTED
    with node_client(socket) as client:
        found = {name: client.rows(name, limit=shown + 1, space=space or "") for name in topics}
    found = {name: rows for name, rows in found.items() if rows or name not in OPTIONAL}
    left_out = len(found.get("blocks", ())) > shown
    if left_out:
        found["blocks"] = found["blocks"][:shown]
    if json_:
        click.echo(as_json(found))
        return
    show(found)
    if left_out:
        hint = f": --limit shows up to {BLOCK_ROWS_MAX}" if shown < BLOCK_ROWS_MAX else ""
        click.echo(f"there are more blocks than these {shown}{hint}", err=True)


def _inspect_prefix(
    socket: Path,
    flags: IndexFlags | None,
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
    """`flags` None: of the node at `socket` only."""
    if sum(given is not None for given in (tokens_file, keys_file, text)) != 1:
        raise click.UsageError(
            "name one prompt: --tokens-file FILE, --keys-file FILE or --text TEXT"
        )
    if (text is None) != (tokenizer is None):
        raise click.UsageError("--text and --tokenizer go together")
    if keys_file is not None and cache_salt is not None:
        raise click.UsageError("--cache-salt is in the keys already: leave it out")
    try:
        keys = read_keys(keys_file) if keys_file is not None else []
        tokens = read_tokens(tokens_file) if tokens_file is not None else []
        if text is not None:
            assert tokenizer is not None
            tokens = tokenize(text, tokenizer)
        if flags is not None and keys and is_whole(space):
            hashing = hashing_of_keys(space, tenant or DEFAULT_TENANT)
            _inspect_prefix_everywhere(flags, prompt_of_keys(keys, hashing), hashing, json_=json_)
            return
        with node_client(socket, hint=_NO_NODE_HINT if flags is not None else "") as client:
            hashing = choose(client.hashings(), space=space, tenant=tenant or "")
            prompt = (
                prompt_of_keys(keys, hashing)
                if keys
                else prompt_of_tokens(tokens, hashing, cache_salt=cache_salt or "")
            )
            here = look_up(client, prompt, hashing) if flags is None else None
    except ConfigError as error:
        fail(str(error), code=2)
    if here is not None:
        _print(here, show_prefix, json_=json_)
    elif flags is not None:
        _inspect_prefix_everywhere(flags, prompt, hashing, json_=json_)


def _inspect_prefix_everywhere(
    flags: IndexFlags, prompt: Prompt, hashing: HashingReport, *, json_: bool
) -> None:
    with index_client(flags) as index:
        try:
            found = look_up_everywhere(index, prompt, hashing)
        except ValueError as error:
            fail(str(error), code=2)
    _print(found, show_cluster_prefix, json_=json_)


def _print(prefix: _P, show_it: Callable[[_P], None], *, json_: bool) -> None:
    if json_:
        click.echo(prefix_as_json(prefix))
    else:
        show_it(prefix)


@click.command()
@click.argument("request_id", required=False)
@SOCKET_OPTION
@click.option("--json", "json_", is_flag=True, help="One JSON object: a list of requests.")
@click.option(
    "--last",
    type=click.IntRange(1, REQUEST_ROWS_MAX),
    help=f"Without an id: so many requests.  [default: {REQUESTS_LISTED}]",
)
def explain(request_id: str | None, socket: Path, last: int | None, *, json_: bool) -> None:
    """Why a recent request hit or missed: where each block of its prompt came from, or why it was
    not there, and how long each step took.

    REQUEST_ID is what the client was given, such as cmpl-4f1a, or its beginning; without one the
    latest requests are listed. The node remembers some 1000, since its start.

    \b
    Examples:
      kvstore explain
      kvstore explain cmpl-4f1a22
      kvstore explain cmpl-4f1a22 --json | jq '.requests[0].ranges'
    """
    if request_id is not None and last is not None:
        raise click.UsageError("--last lists the latest requests: leave REQUEST_ID out")
    limit = REQUEST_ROWS_MAX if request_id is not None else last or REQUESTS_LISTED
    stories: list[Story] = []
    with node_client(socket) as client:
        found = client.requests(request_id or "", limit=limit)
        for row in found:
            wanted = request_id is not None and (json_ or len(found) == 1)
            stories.append((row, client.ranges(row.number) if wanted else None))
    if request_id is not None and not found:
        fail(
            f"no request that this node remembers has the id {request_id!r}: it may be running "
            "still, or too long ago; 'kvstore explain' lists the latest",
            code=1,
        )
    if json_:
        click.echo(stories_as_json(stories))
    elif request_id is not None and len(found) == 1:
        show_story(found[0], stories[0][1] or [])
    elif found:
        show_stories(found)
        if request_id is not None:
            click.echo(f"{len(found)} requests fit {request_id!r}: give one of these ids")
    else:
        click.echo("no request has ended since the node started")


@click.command()
@SOCKET_OPTION
@index_options
@click.option(
    "--interval",
    type=click.FloatRange(0.5, 60),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Between two looks.",
)
@click.option("--once", is_flag=True, help="One look, over one interval, and no screen.")
@click.option("--json", "json_", is_flag=True, help="The same as one JSON object.")
def top(
    socket: Path,
    interval: float,
    *,
    once: bool,
    json_: bool,
    index: tuple[str, ...],
    ca: str | None,
    cert: str | None,
    key: str | None,
    insecure: bool,
) -> None:
    """What a node does now, or with --index all nodes of the cluster: memory, hits, bytes a second,
    leases, fetches. q leaves.

    Hits and bytes a second are of the last interval, p50 and p99 of fetches since the node began;
    loaded is what was leased to engines. Nodes tell the index what they do: one that is silent is
    shown so, and nobody waits for it.

    \b
    Examples:
      kvstore top
      kvstore top --index 10.0.0.1:9470 --ca pki/ca.crt --cert pki/node-n1.crt --key pki/node-n1.key
      kvstore top --json | jq '.nodes[0].hit_percent'
    """
    flags = IndexFlags(index=index, ca=ca, cert=cert, key=key, insecure=insecure)
    everywhere = asks_index(flags)
    out = console()
    once |= json_
    if not (once or out.is_terminal):
        raise click.UsageError("top draws on a terminal: add --once or --json for scripts")
    with contextlib.ExitStack() as stack:
        source: Source = OneNode(socket)
        if everywhere:
            source = AllNodes(stack.enter_context(index_client(flags)), ", ".join(index))
        try:
            source.sample()  # what was never there is not silent, it is a wrong flag
        except AttachError as error:
            fail(str(error), code=1)
        if not once:
            watch(source, out, interval_s=interval)
            return
        view = one_view(source, threading.Event().wait, interval_s=interval)
        if json_:
            click.echo(figures_as_json(view))
        else:
            head = f"kvstore top {source.name}"
            out.print(page(view.figures, head=head, trouble=view.trouble, width=out.width))
