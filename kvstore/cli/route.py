"""`kvstore route`: why a request went where it went, and where it would go.

explain ID    its receipts, from the router's log       --dry-run BODY: of a request not sent
replay        all receipts of a log, decided again under another policy
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvstore.cli.commands import A_FILE, as_json, fail, option, options
from kvstore.config.defaults import DEFAULT_ROUTER_LISTEN
from kvstore.config.settings import Settings
from kvstore.errors import AttachError, ConfigError
from kvstore.units import US_PER_S, format_us

if TYPE_CHECKING:
    from kvstore.cli.ask import Site
    from kvstore.routing.receipts import Receipt

DRY_TIMEOUT_S: Final = 10.0
WORKERS_SHOWN: Final = 16
_LOG: Final = option(type=A_FILE)("The router's log (its --receipts FILE).")


@click.group()
def route() -> None:
    """Explain a router's decisions, and repeat them under another policy.

    \b
    Examples:
      kvstore route explain req-16dedf9b777579f2 --receipts /var/log/kvstore/receipts
      kvstore route explain --dry-run body.json --router http://127.0.0.1:8080
      kvstore route explain --dry-run body.json --router https://127.0.0.1:8443 \\
        --server-name router.example --api-key "$KEY"
      kvstore route replay --receipts /var/log/kvstore/receipts --policy new.yaml
    """


class RouteSettings(Settings):
    """Settings of `kvstore route explain`."""

    receipts: Path | None = _LOG
    dry_run: Path | None = option(type=A_FILE)(
        "Body of a request: show its decision, do not send it."
    )
    router: str = option(
        default=f"http://{DEFAULT_ROUTER_LISTEN}", show_default=True, metavar="URL"
    )("Router for --dry-run; it must run on this machine.")
    path: str = option(default="/v1/completions", show_default=True, metavar="PATH")(
        "Endpoint of the body of --dry-run."
    )
    api_key: str | None = option(metavar="KEY")("API key, if the router has --api-keys.")
    ca: Path | None = option(type=A_FILE)(
        "CA certificate of an https:// router.  [default: CAs of the system]"
    )
    cert: Path | None = option(type=A_FILE)("Client certificate, if the router demands one.")
    key: Path | None = option(type=A_FILE)("Private key of that certificate.")
    server_name: str | None = option(metavar="NAME")(
        "Name in the router's certificate.  [default: the host of --router]"
    )
    json: bool = option(is_flag=True)("Print one JSON object with a list of receipts.")


@route.command()
@click.argument("request_id", required=False)
@options(RouteSettings)
def explain(asked: RouteSettings, request_id: str | None) -> None:
    """Show the receipt of REQUEST_ID (the response header x-request-id): the cost of each worker in
    seconds, term by term, and why a worker was left out or chosen by load only."""
    receipts, body = asked.receipts, asked.dry_run
    given = (request_id is not None, receipts is not None, body is not None)
    if given not in ((True, True, False), (False, False, True)):
        raise click.UsageError("give REQUEST_ID and --receipts FILE, or --dry-run FILE alone")
    if body is not None:
        found = [_dry(asked, body)]
    else:
        assert receipts is not None
        assert request_id is not None
        found = [each for each in _read(receipts) if request_id in each.request_id]
    if not found:
        fail(f"{receipts} has no receipt of {request_id!r}: it may be too old", code=1)
    if asked.json:
        click.echo(as_json(receipts=found))
        return
    for receipt in found:
        show_receipt(receipt)


class ReplaySettings(Settings):
    """Settings of `kvstore route replay`."""

    receipts: Path | None = _LOG
    policy: Path = option(type=A_FILE, required=True)("YAML file of the other policy.")
    json: bool = option(is_flag=True)("Print one JSON object.")


@route.command()
@options(ReplaySettings)
def replay(asked: ReplaySettings) -> None:
    """Repeat the decisions of a log under another policy: how many requests would have gone to
    another worker, and the mean predicted time to the first token under both. Requests that were
    rejected are left out."""
    if (receipts := asked.receipts) is None:
        raise click.UsageError("name the log: --receipts FILE")
    from kvstore.config.router import load_policy
    from kvstore.routing.decide import replay as decide_again

    other = load_policy(asked.policy)
    pairs = [(each, decide_again(each, other)) for each in _read(receipts) if each.chosen]
    if not pairs:
        fail(f"{receipts} has no receipts of requests that got a worker", code=1)
    changed = [new for old, new in pairs if new.chosen != old.chosen]
    means = [sum(pair[side].predicted_s for pair in pairs) / len(pairs) for side in (0, 1)]
    shares = Counter(new.chosen or "none" for _, new in pairs)
    if asked.json:
        counts = {"requests": len(pairs), "elsewhere": len(changed)}
        click.echo(as_json(**counts, predicted_s=means, workers=shares))
        return
    before, after = (format_us(mean * US_PER_S) for mean in means)
    click.echo(
        f"{len(pairs)} requests, {len(changed)} would have gone elsewhere; predicted time to the"
        f" first token {before} then, {after} under this policy"
    )
    for worker, count in shares.most_common():
        click.echo(f"  {worker}: {count}")


def _read(path: Path) -> Iterator[Receipt]:
    from kvstore.router.receipt_log import read_receipts

    return read_receipts(path)


def _dry(its: RouteSettings, body: Path) -> Receipt:
    import msgspec

    from kvstore.routing.receipts import Receipt

    site, path, url = _site(its), f"/kvstore/explain{its.path}", its.router
    if its.api_key and not (its.api_key.isascii() and its.api_key.isprintable()):
        raise ConfigError("--api-key has a character that no HTTP header may have")
    headers = {"Authorization": f"Bearer {its.api_key}"} if its.api_key else {}
    try:
        asked = body.read_bytes()
    except OSError as error:
        raise ConfigError(f"--dry-run {body} cannot be read: {error.strerror}") from None
    try:
        status, content = site.ask(path, asked, timeout_s=DRY_TIMEOUT_S, **headers)
    except AttachError as error:
        raise AttachError(f"{url} did not answer: {error}") from None
    try:
        if status != 200:
            message = msgspec.json.decode(content)["error"]["message"]  # of OpenAI's form
            fail(f"{url} answered {status}: {message}", code=1)
        return msgspec.json.decode(content, type=Receipt)
    except (msgspec.DecodeError, KeyError, TypeError):
        fail(f"{url} is no kvstore router: give the address of its --listen", code=1)


def _site(its: RouteSettings) -> Site:
    """The router to ask. Raises ConfigError: no URL, flags that do not go together, or unusable TLS
    files.
    """
    from kvstore.cli.ask import Site, tls_context

    url, name = its.router, its.server_name
    if (scheme := url.partition("://")[0].lower()) not in ("http", "https"):
        raise ConfigError(f"--router {url!r} must be a URL, such as http://{DEFAULT_ROUTER_LISTEN}")
    if scheme == "http" and (its.ca or its.cert or its.key or name):
        raise ConfigError(
            f"--ca, --cert, --key and --server-name are for https://, and --router is {url}"
        )
    if (its.cert is None) != (its.key is None):
        raise ConfigError("--cert and --key go together: give both")
    context = tls_context({"--ca": its.ca, "--cert": its.cert, "--key": its.key})
    advice = ("give its CA with --ca", "give its own name with --server-name")
    is_anonymous = scheme == "https" and its.cert is None
    return Site(url, context, DEFAULT_ROUTER_LISTEN, "--listen", *advice, name, is_anonymous)


def _prefixes(receipt: Receipt) -> str:
    """Sentence about the source of the prefix lengths in a receipt."""
    if receipt.index_trust != "none":
        return f"prefixes {receipt.index_trust} (index epoch {receipt.index_epoch})"
    if "prefix-approximate" in receipt.degraded:
        return "prefixes approximate (by what this router sent)"
    return "prefixes none (routed by load)"


def show_receipt(receipt: Receipt) -> None:
    """Print a receipt: facts, then a table of workers, best first."""
    outcome = receipt.outcome
    took = f", took {format_us(outcome.ttft_s * US_PER_S)}" if outcome.ttft_s is not None else ""
    goal = f", objective {format_us(receipt.objective_s * US_PER_S)}" if receipt.objective_s else ""
    facts = [
        f"request {receipt.request_id}: {receipt.chosen or 'rejected'}",
        f"model {receipt.model}, pool {receipt.pool}, prompt tokens: {receipt.prompt_tokens}"
        + " (estimated: it was not tokenized)" * receipt.prompt_is_estimated,
        f"class {receipt.service}, attempt {receipt.attempt}, role {receipt.role or '-'}",
        f"policy {receipt.policy} ({receipt.policy_hash})",
        _prefixes(receipt),
        f"predicted {format_us(receipt.predicted_s * US_PER_S)}{goal}{took}",
    ]
    if outcome.rejected:
        facts.append(f"rejected: {outcome.rejected}")
    if receipt.split_reason not in ("", "no-prefillers"):
        where = f"at {receipt.prefill_worker}" if receipt.prefill_worker else "local"
        facts.append(f"prefill {where} ({receipt.split_reason})")
    facts += [
        f"ahead of time ({each.reason}) at {each.worker}: of {each.blocks} blocks {each.dram} in"
        f" dram, {each.reading} read from disk, {each.sought} asked of other nodes"
        + (f"; {each.trouble}" if each.trouble else "")
        for each in outcome.prepared
    ]
    if outcome.raced_s is not None:
        ends = f"{outcome.race_winner or 'none'} won, {outcome.race_loser or 'none'} lost"
        facts.append(f"raced after {format_us(outcome.raced_s * US_PER_S)}: {ends}")
    if receipt.chosen in receipt.workers[: len(receipt.cached)]:
        expected = receipt.cached[receipt.workers.index(receipt.chosen)]
        own = "" if outcome.cached_tokens is None else f", {outcome.cached_tokens} by the engine"
        facts.append(f"cached tokens: {expected:.0f} expected{own}")
    if receipt.degraded:
        facts.append(f"degraded: {', '.join(receipt.degraded)}")
    click.echo("\n".join(facts))
    columns = receipt.terms | {"cached": receipt.cached}
    names = [name for name, column in columns.items() if any(column)]
    rows = sorted(zip(receipt.scores, range(len(receipt.workers)), strict=True))[:WORKERS_SHOWN]
    width = max((len(worker) for worker in receipt.workers), default=6)
    click.echo("  " + " ".join([f"{'worker':{width}}", *(f"{n:>12}" for n in ["score", *names])]))
    for score, at in rows:
        worker = receipt.workers[at]
        values = [score, *(columns[name][at] for name in names)]
        why = receipt.filtered.get(worker, "")
        unknown = receipt.load_only.get(worker, "")
        line = " ".join([f"{worker:{width}}", *(f"{value:12.4f}" for value in values)])
        click.echo(
            f"  {line}{f'  left out: {why}' if why else ''}"
            + (f"  load-only: {unknown}" if unknown else "")
        )
    sys.stdout.flush()
