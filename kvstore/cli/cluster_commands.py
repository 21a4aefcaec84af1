"""The command line of the cluster: `kvstore index` and `kvstore certs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvstore.cli.commands import settings_options
from kvstore.config.defaults import CERTIFICATE_DAYS
from kvstore.config.settings import IndexSettings


@click.command()
@settings_options(IndexSettings)
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

    config = load_index_config(config_path, flags)
    from kvstore.indexer.replica import run_index

    logs.setup(config.log_level)
    harden_process()
    run_index(config)


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
    made = make_certificates(
        directory,
        identities,
        hosts=hosts.split(",") if hosts else (),
        days=days,
        nodes_are_indexes=with_index,
    )
    for file in made:
        click.echo(file)
