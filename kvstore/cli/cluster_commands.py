"""The command line of the cluster: `kvstore index`, `kvstore certs`, and what `kvstore node` has
more in one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from kvstore.cli.commands import TLS_OPTIONS
from kvstore.config.defaults import (
    CERTIFICATE_DAYS,
    DEFAULT_ENTRIES,
    DEFAULT_INDEX_METRICS,
    DEFAULT_LISTEN,
    FETCH_WHEN,
    LOG_LEVELS,
)
from kvstore.errors import ConfigError

_F = TypeVar("_F", bound=Callable[..., Any])

_NODE_OPTIONS: Final = (
    click.option(
        "--index",
        multiple=True,
        metavar="HOST:PORT",
        help="Tell this replica of the index what is held here; repeatable: name all of them.",
    ),
    click.option(
        "--index-listen",
        metavar="ADDR",
        help="Be a replica of the index, too, on this address; port 0 picks one.",
    ),
    click.option(
        "--index-entries",
        metavar="N",
        help=f"Blocks, by holder, that the replica keeps.  [default: {DEFAULT_ENTRIES}]",
    ),
    click.option(
        "--engine-events",
        multiple=True,
        callback=lambda _context, _option, given: list(given) or None,
        metavar="NAME=ENDPOINT,space=HEX[,replay=ENDPOINT][,rank=N][,tenant=NAME][,seed=TEXT]",
        help="Read the KV events of this engine, which has no connector, so that the index knows"
        " what its own memory holds; repeatable. ENDPOINT is ipc:///PATH or tcp://127.0.0.1:PORT.",
    ),
    click.option(
        "--peer-listen",
        metavar="ADDR",
        help="Where other nodes reach this one, to fetch what is held here; it fetches from them,"
        " too. Port 0 picks one.",
    ),
    click.option(
        "--transport",
        metavar="NAME[,KEY=VALUE…]",
        help="By what blocks are moved between nodes: tcp[,port=NUMBER], which uses the"
        " certificates; nixl[,plugin=NAME][,plugin.OPTION=VALUE] or ucx, for RDMA and networks that"
        " are trusted; each with pace=on to give way to other flows.  [default: tcp; with"
        " --insecure nixl, where it is installed]",
    ),
    click.option(
        "--fetch",
        type=click.Choice(FETCH_WHEN),
        help="Which blocks of other nodes are fetched: those that take half as long as computing"
        " them, or less; or all.  [default: auto]",
    ),
    *TLS_OPTIONS,
)


def cluster_options(command: _F) -> _F:
    """Options of `kvstore node` that are about more than one machine."""
    for option in reversed(_NODE_OPTIONS):
        command = option(command)
    return command


def _tls_options(command: _F) -> _F:
    for option in reversed(TLS_OPTIONS):
        command = option(command)
    return command


@click.command()
@click.option("--listen", metavar="ADDR", help=f"Where it listens.  [default: {DEFAULT_LISTEN}]")
@click.option(
    "--entries",
    metavar="N",
    help="Blocks, by holder, that it keeps; what was longest not asked for and not told leaves. "
    f" [default: {DEFAULT_ENTRIES}]",
)
@click.option(
    "--store",
    metavar="URL",
    help="Keep what nodes tell in this Redis or Valkey, which several replicas can share:"
    " redis://HOST:PORT/N, or rediss://… with TLS.  [default: in memory]",
)
@click.option("--store-password-file", metavar="FILE", help="The password for it.")
@click.option(
    "--store-ca", metavar="FILE", help="CA of its certificate.  [default: those of the system]"
)
@_tls_options
@click.option(
    "--insecure/--secure",
    default=None,
    help="No TLS and no authentication. For labs.",
)
@click.option(
    "--metrics",
    metavar="ADDR|off",
    help=f"Where /metrics and /healthz are; port 0 picks one.  [default: {DEFAULT_INDEX_METRICS}]",
)
@click.option(
    "--metrics-beyond-loopback/--metrics-loopback-only",
    default=None,
    help="Allow an address that other machines can read, such as a pod's.",
)
@click.option(
    "--plain/--compiled",
    default=None,
    help="Start at once, and be some times slower; --compiled needs the extra 'index', and many"
    " seconds before it is ready.  [default: compiled, where the extra is installed]",
)
@click.option("--log-level", type=click.Choice(LOG_LEVELS), help="[default: info]")
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="YAML with the same names as the flags; flags win.",
)
def index(config_path: Path | None, **flags: Any) -> None:
    """Run a replica of the index until SIGTERM: it knows which node holds which prefix, by what the
    nodes tell it. Start several and name them all to each node; it keeps nothing on disk.
    With --store several share what they know, and one that starts knows it at once.

    \b
    Examples:
      kvstore certs pki --index i1 --node n1
      kvstore index --ca pki/ca.crt --cert pki/index-i1.crt --key pki/index-i1.key
      kvstore index --store rediss://valkey.example:6379/0 --store-password-file pw --ca …
      kvstore index --insecure
    """
    from kvstore.config.index import load_index_config
    from kvstore.net.harden import harden_process
    from kvstore.obs import logs

    settings = {name.replace("_", "-"): value for name, value in flags.items()}
    try:
        config = load_index_config(config_path, settings)
        from kvstore.indexer.replica import run_index

        logs.setup(config.log_level)
        harden_process()
        run_index(config)
    except ConfigError as error:
        raise click.ClickException(str(error)) from None


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--node", multiple=True, metavar="NAME", help="Make one of this node; repeatable.")
@click.option("--index", multiple=True, metavar="NAME", help="Of this replica; repeatable.")
@click.option("--client", multiple=True, metavar="NAME", help="Of a router or script; repeatable.")
@click.option("--with-index", is_flag=True, help="The nodes are replicas, too (--index-listen).")
@click.option(
    "--hosts",
    metavar="HOST,…",
    help="Names and addresses in them for other programs; kvstore needs none.",
)
@click.option("--days", type=click.IntRange(1, 3650), default=CERTIFICATE_DAYS, show_default=True)
def certs(
    directory: Path,
    node: tuple[str, ...],
    index: tuple[str, ...],
    client: tuple[str, ...],
    *,
    with_index: bool,
    hosts: str | None,
    days: int,
) -> None:
    """Make a lab's CA in DIRECTORY, once, and certificates by it. Nothing is overwritten.

    A node speaks for the name in its certificate only. Whoever has ca.key can be everybody: keep it
    off the nodes, or use your site's CA with the same names, which are DNS names such as
    NAME.node.kvstore, NAME.index.kvstore with index.kvstore, and NAME.client.kvstore.

    \b
    Examples:
      kvstore certs pki --index i1 --node n1 --node n2 --client router
      kvstore certs pki --node n3 --with-index
    """
    if not (node or index or client):
        raise click.UsageError("name whom to make certificates of: --node, --index or --client")
    if with_index and not node:
        raise click.UsageError("--with-index is about nodes: add --node NAME")
    from kvstore.cli.certs import make_certificates
    from kvstore.wire.identity import Identity

    identities = [
        *(Identity("node", name) for name in node),
        *(Identity("index", name) for name in index),
        *(Identity("client", name) for name in client),
    ]
    try:
        made = make_certificates(
            directory,
            identities,
            hosts=hosts.split(",") if hosts else (),
            days=days,
            nodes_are_indexes=with_index,
        )
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    for file in made:
        click.echo(file)
