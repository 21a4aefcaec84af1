"""`kvstore pd-proxy`: flags to the configuration of the proxy."""

from __future__ import annotations

from typing import Any

import click

from kvstore.cli.commands import A_FILE
from kvstore.errors import ConfigError


@click.command("pd-proxy")
@click.option(
    "--prefill",
    multiple=True,
    required=True,
    metavar="URL",
    help="Base URL of a prefill engine; repeatable, used in turn.",
)
@click.option(
    "--decode",
    multiple=True,
    required=True,
    metavar="URL",
    help="Base URL of a decode engine; repeatable, used in turn.",
)
@click.option(
    "--listen",
    default="127.0.0.1:8000",
    show_default=True,
    metavar="ADDR",
    help="Address to listen on; port 0: any free port.",
)
@click.option(
    "--legs",
    type=click.Choice(["in-turn", "together"]),
    default="in-turn",
    show_default=True,
    help="Decode engine after the prefill engine has answered, or at the same time.",
)
@click.option(
    "--prefill-timeout",
    "prefill_timeout_s",
    type=click.FloatRange(0.1, 3600),
    default=30,
    show_default=True,
    metavar="SECONDS",
    help="Longest wait for a prefill engine; after it the decode engine computes the prompt.",
)
@click.option("--cert", type=A_FILE, help="Certificate of this server, for TLS towards clients.")
@click.option("--key", type=A_FILE, help="Private key of that certificate.")
@click.option(
    "--engine-ca", type=A_FILE, help="CA certificate of engines at https://.  [default: system]"
)
@click.option("--insecure", is_flag=True, help="HTTP without TLS beyond this machine. For labs.")
def pd_proxy(**flags: Any) -> None:
    """Send each request to a prefill engine, then to a decode engine, until SIGTERM.

    Serves /v1/completions, /v1/chat/completions, /v1/models and /health. The prefill engine
    computes the prompt, its node sends the blocks to the decode engine's node, and the decode
    engine answers. If the prefill engine fails or is late, the decode engine computes the prompt
    itself. A reference for trials: it chooses engines in turn, not by cached prefixes or load.

    \b
    Examples:
      kvstore pd-proxy --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200
      kvstore pd-proxy --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 \\
        --decode http://127.0.0.1:8201 --legs together
    """
    try:
        from kvstore.pd.proxy import run_proxy
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise ConfigError(
            "pd-proxy needs aiohttp, not installed here: pip install 'kvstore-llm[router]'"
        ) from None
    from kvstore.obs import logs
    from kvstore.pd.config import pd_config

    config = pd_config(**flags)
    logs.setup("info")
    run_proxy(config)
