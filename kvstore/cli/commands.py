"""What several commands share: options that name a node or an index, clients of both, one way to
fail.

Modules of commands import click and defaults only, and functions what they need: `--help` answers
at once, and so do commands that need neither gRPC nor certificates.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypedDict, TypeVar

import click

from kvstore.config.defaults import DEFAULT_SOCKET
from kvstore.errors import AttachError, ConfigError

if TYPE_CHECKING:
    from kvstore.cli.ask import NodeClient
    from kvstore.client.index import IndexClient

INDEX_TIMEOUT_S: Final = 5.0
_F = TypeVar("_F", bound=Callable[..., Any])

SOCKET_OPTION: Final = click.option(
    "--socket",
    type=click.Path(path_type=Path),
    default=Path(DEFAULT_SOCKET),
    show_default=True,
    help="Attach socket of the node.",
)


TLS_OPTIONS: Final = (
    click.option("--ca", metavar="FILE", help="CA certificate of the cluster."),
    click.option("--cert", metavar="FILE", help="Certificate of this process."),
    click.option("--key", metavar="FILE", help="Private key of that certificate."),
)


class IndexFlags(TypedDict):
    """What `index_options` add to a command."""

    index: tuple[str, ...]
    ca: str | None
    cert: str | None
    key: str | None
    insecure: bool


def index_options(command: _F) -> _F:
    """Options of a command that asks the index instead of one node."""
    options = (
        click.option(
            "--index",
            multiple=True,
            metavar="HOST:PORT",
            help="Query this replica of the prefix index for the whole cluster; repeatable.",
        ),
        *TLS_OPTIONS,
        click.option("--insecure", is_flag=True, help="The index runs without TLS. For labs."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def asks_index(flags: IndexFlags) -> bool:
    """Whether the index is meant. What is only good for asking it is refused without it."""
    if not flags["index"]:
        for name in ("ca", "cert", "key", "insecure"):
            if flags[name]:
                raise click.UsageError(f"--{name} is about the index: add --index HOST:PORT")
    return bool(flags["index"])


@contextlib.contextmanager
def index_client(flags: IndexFlags) -> Iterator[IndexClient]:
    """A client; wrong flags end the program with code 2, an index that is not there with 1."""
    from kvstore.client.index import IndexClient, IndexUnavailable
    from kvstore.config.cluster import TlsSettings, resolve_tls

    endpoints: Sequence[str] = flags["index"]
    settings = TlsSettings(
        ca=flags["ca"], cert=flags["cert"], key=flags["key"], insecure=flags["insecure"]
    )
    try:
        tls = resolve_tls(settings, what="the index")
        with IndexClient(
            endpoints, tls=tls, insecure=tls is None, timeout_s=INDEX_TIMEOUT_S
        ) as client:
            yield client
    except ConfigError as error:
        fail(str(error), code=2)
    except IndexUnavailable as error:
        fail(f"{error} ({', '.join(endpoints)})", code=1)


@contextlib.contextmanager
def node_client(socket: Path, *, hint: str = "") -> Iterator[NodeClient]:
    """A client; what goes wrong with it ends the program with code 1. `hint`: what else helps."""
    from kvstore.cli.ask import NodeClient

    try:
        with contextlib.closing(NodeClient(socket)) as client:
            yield client
    except AttachError as error:
        fail(f"{error}; {hint}" if hint else str(error), code=1)


def fail(sentence: str, *, code: int) -> NoReturn:
    """Say what is wrong and leave."""
    click.echo(f"kvstore: {sentence}", err=True)
    sys.exit(code)
