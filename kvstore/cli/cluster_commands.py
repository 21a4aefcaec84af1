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
        help="Replica of the prefix index to publish to and query; repeatable: name all replicas.",
    ),
    click.option(
        "--index-listen",
        metavar="ADDR",
        help="Run a replica of the prefix index inside this node, on this address; port 0: any free"
        " port.",
    ),
    click.option(
        "--index-entries",
        metavar="N",
        help="Locations (block, node and tier) that this replica keeps."
        f"  [default: {DEFAULT_ENTRIES}]",
    ),
    click.option(
        "--engine-events",
        multiple=True,
        callback=lambda _context, _option, given: list(given) or None,
        metavar="NAME=ENDPOINT,space=HEX[,replay=ENDPOINT][,rank=N][,tenant=NAME][,seed=TEXT]",
        help="Read the KV events of an engine without the connector, so that the index covers its"
        " own memory; repeatable. ENDPOINT is ipc:///PATH or tcp://127.0.0.1:PORT.",
    ),
    click.option(
        "--peer-listen",
        metavar="ADDR",
        help="Address where other nodes reach this one; blocks are served to them and fetched from"
        " them. Port 0: any free port.",
    ),
    click.option(
        "--transport",
        metavar="NAME[,KEY=VALUE…]",
        help="Transport of blocks between nodes. tcp[,port=NUMBER]: with TLS."
        " nixl[,plugin=NAME][,plugin.OPTION=VALUE] or ucx: for RDMA or trusted networks, neither"
        " encrypted nor authenticated. pace=on: yield to other flows.  [default: tcp; nixl with"
        " --insecure where it is installed]",
    ),
    click.option(
        "--fetch",
        type=click.Choice(FETCH_WHEN),
        help="Blocks to fetch from other nodes. auto: where fetching takes at most half as long as"
        " computing; always: all.  [default: auto]",
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
@click.option(
    "--listen", metavar="ADDR", help=f"Address to listen on.  [default: {DEFAULT_LISTEN}]"
)
@click.option(
    "--entries",
    metavar="N",
    help="Locations (block, node and tier) to keep; the least recently used leave first. "
    f" [default: {DEFAULT_ENTRIES}]",
)
@click.option(
    "--store",
    metavar="URL",
    help="Redis or Valkey that several replicas share: redis://HOST:PORT/N, or rediss://… with TLS."
    "  [default: own memory]",
)
@click.option("--store-password-file", metavar="FILE", help="File with the password of --store.")
@click.option(
    "--store-ca", metavar="FILE", help="CA certificate of --store.  [default: CAs of the system]"
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
    help="Address of /metrics and /healthz; port 0: any free port."
    f"  [default: {DEFAULT_INDEX_METRICS}]",
)
@click.option(
    "--metrics-beyond-loopback/--metrics-loopback-only",
    default=None,
    help="Allow a --metrics address that other machines reach, such as a pod's.",
)
@click.option(
    "--plain/--compiled",
    default=None,
    help="--plain: ready at once, several times slower. --compiled: needs the extra 'index' and"
    " many seconds before it is ready.  [default: compiled, where the extra is installed]",
)
@click.option(
    "--log-level", type=click.Choice(LOG_LEVELS), help="Lowest level to log.  [default: info]"
)
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="YAML file with the names of the flags as keys; flags take precedence.",
)
def index(config_path: Path | None, **flags: Any) -> None:
    """Run a replica of the prefix index until SIGTERM: the nodes and tiers that hold each prefix.

    Every node publishes to every replica; name all replicas to each node. A replica keeps nothing
    on disk and is filled again by the nodes within seconds. Replicas with --store share one state,
    so that a new one is complete at once.

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
@click.option(
    "--node", multiple=True, metavar="NAME", help="Issue a certificate for this node; repeatable."
)
@click.option("--index", multiple=True, metavar="NAME", help="For this index replica; repeatable.")
@click.option("--client", multiple=True, metavar="NAME", help="For a router or script; repeatable.")
@click.option(
    "--with-index", is_flag=True, help="The nodes are index replicas too (--index-listen)."
)
@click.option(
    "--hosts",
    metavar="HOST,…",
    help="Further names and addresses in the certificates; kvstore needs none.",
)
@click.option(
    "--days",
    type=click.IntRange(1, 3650),
    default=CERTIFICATE_DAYS,
    show_default=True,
    help="Validity of the certificates.",
)
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
    """Create a CA in DIRECTORY, once, and issue certificates. No file is overwritten.

    A node speaks only for the name in its certificate. The owner of ca.key can impersonate every
    component: keep the file off the nodes. A site's own CA works as well; the DNS names are
    NAME.node.kvstore, NAME.index.kvstore together with index.kvstore, and NAME.client.kvstore.

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
