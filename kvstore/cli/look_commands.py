"""`kvstore inspect`, `kvstore explain` and `kvstore top`: flags to questions (`look`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from kvstore.cli.commands import SOCKET_OPTION, IndexFlags, asks_index, index_options
from kvstore.config.defaults import (
    BLOCK_ROWS_MAX,
    BLOCKS_LISTED,
    REQUEST_ROWS_MAX,
    REQUESTS_LISTED,
    TOPICS,
)


def _topic(_context: click.Context, _option: click.Parameter, given: str | None) -> str | None:
    if given is not None and given not in TOPICS:
        from kvstore.wording import did_you_mean

        near = did_you_mean(given, TOPICS) or f": use one of {', '.join(TOPICS)}"
        raise click.UsageError(f"there is no topic {given!r}{near}")
    return given


@click.command()
@click.argument("topic", required=False, metavar="[TOPIC]", callback=_topic)
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
      nodes    who is attached, who gets nothing and why, the cluster, engines' own memory
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
    asked = flags if asks_index(flags) else None
    if asked is not None and topic not in ("nodes", "prefix"):
        raise click.UsageError("--index is for 'kvstore inspect nodes' and 'prefix': name one")
    from kvstore.cli import look

    if topic == "prefix":
        if limit is not None:
            raise click.UsageError("--limit chooses blocks: use 'kvstore inspect blocks'")
        look.inspect_prefix(socket, asked, space=space or "", json_=json_, **prompt)
        return
    if any(value is not None for value in prompt.values()):
        raise click.UsageError("a prompt is for 'kvstore inspect prefix'")
    if topic != "blocks" and (limit is not None or space is not None):
        raise click.UsageError("--limit and --space choose blocks: use 'kvstore inspect blocks'")
    if asked is not None:
        look.inspect_members(asked, json_=json_)
    else:
        look.inspect_node(socket, topic, limit=limit, space=space, json_=json_)


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
    from kvstore.cli import look

    look.explain_request(socket, request_id, last, json_=json_)


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
    once |= json_
    if not (once or sys.stdout.isatty()):
        raise click.UsageError("top draws on a terminal: add --once or --json for scripts")
    from kvstore.cli import look

    look.watch_nodes(socket, flags if everywhere else None, interval, once=once, json_=json_)
