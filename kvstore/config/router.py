"""The configuration of `kvstore router`: its settings, and what is made of several of them.

    NAME=URL[,KEY=VALUE…] ─▶ WorkerAddress    addresses beyond this machine need TLS or --insecure

Does not cover: contents of the policy file (`kvstore.routing.policy`) and of API keys
(`kvstore.router.front.intake`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from kvstore.client.tls import Tls
from kvstore.config.cluster import resolve_tls
from kvstore.config.reading import load_settings, read_yaml
from kvstore.config.settings import RouterSettings
from kvstore.config.values import is_exposed, joined
from kvstore.errors import ConfigError
from kvstore.installation import is_installed, lacking
from kvstore.routing.policy import RoutingPolicy, parse
from kvstore.routing.values import WorkerFacts, WorkerRole
from kvstore.wire.load import is_base_url
from kvstore.wording import did_you_mean

# ── policy file ───────────────────────────────────────────────────────────────────────────────────
# The policy file: YAML to the policy of the decision core, checked.


def load_policy(path: Path | None, *, is_again: bool = False) -> RoutingPolicy:
    """The policy in a file; `path` None: the default policy. `is_again`: a pipe is refused, since
    it might never be read to its end (a shell's `<(…)`) while requests wait. Raises ConfigError.
    """
    if is_again and path is not None and path.is_fifo():
        raise ConfigError(f"--policy {path} is a pipe, which is read once: reload a file")
    content = read_yaml("--policy", path) if path is not None else {}
    try:
        return parse(content or {})
    except ValueError as error:
        raise ConfigError(f"--policy {path}: {error}") from None


# ── router ────────────────────────────────────────────────────────────────────────────────────────

KINDS: Final = ("vllm", "sglang", "tgi", "trtllm", "triton", "llamacpp", "ollama", "openai")
ROLES: Final = tuple(WorkerRole)
KEYS: Final = ("kind", "pool", "node", "engine", "tenant", "space", "block", "seed", "role", "rank")
INDEX_KEYS: Final = ("node", "engine", "tenant", "space", "seed", "rank")
"""Options of a worker that have no effect without an index."""
TOKENIZER_FILES: Final = ("tokenizer*", "vocab*", "*.model", "tekken.json")
SLICE_KEYS: Final = (*KEYS, "scheme")
_FIELDS: Final = {"block": "block_tokens", "seed": "hash_seed"}
"""Option → its field, where that has another name."""
_PATTERNS: Final = {
    "kind": ("|".join(KINDS), f"kind is one of {', '.join(KINDS)}"),
    "role": ("|".join(ROLES), f"role is one of {', '.join(ROLES)}"),
    "block": ("[0-9]+", "block is a number"),
    "rank": ("[0-9]+", "rank is a number"),
    "space": ("[0-9a-f]{64}", "space has 64 hex digits, as 'kvstore inspect' shows"),
    "scheme": ("https?", "scheme is one of http, https"),
}
"""Option → (pattern of its values, error message for another value)."""


class WorkerAddress(WorkerFacts, frozen=True, kw_only=True):
    """A worker, as its source describes it: flags, DNS, the index, Kubernetes."""

    name: str
    url: str
    kind: str = "vllm"
    """Kind of engine, of `KINDS`."""
    tenant: str = ""
    space: str = ""
    """Space in hex; empty: from the registry of the index."""
    block_tokens: int = 0
    """Tokens of a block; 0: as its metrics page has it."""
    hash_seed: str = "vllm-none-hash"


class RouterConfig(RouterSettings):
    """The whole configuration of `kvstore router`, checked."""

    tls: Tls | None
    """Certificates within the cluster; None: plain."""
    front: Tls | None
    """Certificates for clients of `listen`; None: plain HTTP."""
    workers: tuple[WorkerAddress, ...]
    names: tuple[WorkerAddress, ...]
    """DNS names, each of which stands for several engines."""
    slices: WorkerAddress | None
    """Kubernetes service of engines, SCHEME://NAMESPACE/SERVICE/PORT; None: none."""
    worker_key: str
    tokenizers: Mapping[str, Path]
    """Model → directory of its local tokenizer."""


def load_router_config(path: Path | None, flags: Mapping[str, Any]) -> RouterConfig:
    """The checked configuration of `kvstore router`. Raises ConfigError: one sentence, and how to
    mend it.
    """
    config = load_settings(path, flags, RouterConfig)
    if not is_installed("aiohttp"):
        raise ConfigError(lacking("the router", "aiohttp", "node,router"))
    is_in_the_cluster = config.ca or config.cert or config.key
    config.tls = resolve_tls(config, what="the router") if is_in_the_cluster else None
    config.front = _front(config)
    is_plain = config.tls is None and not config.insecure
    if is_plain:
        _refuse_plain(config)
    if config.peer_router and config.tls is not None and not config.tls.name_as("client"):
        raise ConfigError(
            "--peer-router needs a --cert with a name in the role client, the same in all routers:"
            " kvstore certs DIRECTORY --client NAME"
        )
    config.workers = _workers(config)
    names = config.worker_dns or ()
    config.names = tuple(worker_of("--worker-dns", each, config, is_name=True) for each in names)
    config.slices = _slices(config)
    config.worker_key = _secret(config.worker_key_file)
    config.tokenizers = dict(map(_tokenizer, config.tokenizer or ()))
    return config


def _refuse_plain(config: RouterConfig) -> None:
    """Raises ConfigError if a router without TLS in the cluster would be reached from, or reach,
    other processes of the cluster.
    """
    listens = {"--route-listen": config.route_listen, "--picker-listen": config.picker_listen}
    if config.front is None:
        listens = {"--listen": config.listen, **listens}
    for option, listen in listens.items():
        if listen is not None and not listen.is_loopback:
            raise ConfigError(
                f"{option} {joined(*listen)} can be reached from other machines: give --ca, --cert"
                " and --key, or --insecure: no encryption, for labs"
            )
    for option, servers in {"--index": config.index, "--peer-router": config.peer_router}.items():
        if servers:
            raise ConfigError(
                f"{option} needs TLS: give --ca, --cert and --key, or --insecure in a lab"
            )


def _front(settings: RouterConfig) -> Tls | None:
    """Certificate that clients see, and the CA of theirs; those of the cluster where none are
    given. None: plain HTTP.
    """
    if not (settings.listen_cert or settings.listen_ca):
        return settings.tls
    cert, key = settings.listen_cert or settings.cert, settings.listen_key or settings.key
    ca = settings.listen_ca or settings.ca
    assert cert is not None
    assert key is not None
    if ca is None and settings.api_keys is None:
        raise ConfigError(
            "--listen-cert alone would admit every client: add --api-keys, or --listen-ca with"
            " the CA of client certificates"
        )
    from kvstore.client.certificates import load_listening  # only here: plain ones need none

    return load_listening(Path(cert), Path(key), ca_path=Path(ca) if ca else None)


def _workers(settings: RouterSettings) -> tuple[WorkerAddress, ...]:
    found = [worker_of("--worker", text, settings) for text in settings.worker or ()]
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--worker names {name!r} twice: each engine needs its own name")
    others = settings.worker_dns or settings.worker_slices or settings.index
    if not (found or others):
        raise ConfigError(
            "name the engines: --worker NAME=URL, --worker-dns, --worker-slices, or --index whose"
            " nodes list theirs"
        )
    if not others and all(each.role is WorkerRole.PREFILL for each in found):
        raise ConfigError("--worker names prefillers only: add an engine with role=decode or both")
    from yarl import URL  # only here: it comes with aiohttp

    places = dict[object, WorkerAddress]()
    for each in found:
        url = URL(each.url)
        if (same := places.setdefault((url.host, url.port, each.rank), each)) is not each:
            raise ConfigError(
                f"--worker names {url.host}:{url.port} twice, as {same.name!r} and {each.name!r}:"
                " leave one out, or with --index give each data-parallel rank its rank=N"
            )
    return tuple(found)


def worker_of(
    option: str, text: str, settings: RouterSettings, *, is_name: bool = False
) -> WorkerAddress:
    """An engine of NAME=URL[,KEY=VALUE…]; or of URL[,…] if the host is a DNS name of several
    (`is_name`).

    Raises:
        ConfigError: the text is invalid, or the URL is beyond this machine without TLS.
    """
    written, (address, *pairs) = f"{option} {text!r}", text.split(",")
    name, equals, url = ("dns", "=", address) if is_name else address.partition("=")
    # Clients of OpenAI's API have /v1 in their base URL.
    url = re.sub(r"(?<=[^/])/v1$", "", url.rstrip("/"))
    if not equals or not name or not name.isprintable() or not is_base_url(url):
        form = "a URL, such as http://vllm" if is_name else "NAME=URL, such as a=http://127.0.0.1"
        raise ConfigError(f"{written} must be {form}:8000: scheme, host and port, without a path")
    options = _options(written, pairs, KEYS, settings)
    if is_exposed(url, is_name=is_name) and not settings.insecure:
        raise ConfigError(
            f"{option} {url} is beyond this machine, and everybody on the way can read prompts: use"
            " https://, or --insecure where the network is trusted"
        )
    return _address(name, url, options)


def _address(name: str, url: str, options: Mapping[str, str]) -> WorkerAddress:
    numbers = {key: int(options[key]) for key in ("block", "rank") if key in options}
    fields = {_FIELDS.get(key, key): its for key, its in {**options, **numbers}.items()}
    return msgspec.convert({"name": name, "url": url, **fields}, WorkerAddress)


def _options(
    written: str, pairs: Sequence[str], keys: Sequence[str], settings: RouterSettings
) -> dict[str, str]:
    """Options of engines by their key, checked; without an index those that it alone gives an
    effect are refused. `node` and `engine` have one where engines may prefill, since they lead
    blocks from prefill to decode engines.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in keys or not value:
            what = f"{key} has no value" if key in keys else f"unknown key {key!r}"
            near = did_you_mean(key, keys) if key not in keys else ""
            raise ConfigError(f"{written}: {what}{near or '; keys are ' + ', '.join(keys)}")
        found[key] = value
    texts = (*(settings.worker or ()), *(settings.worker_dns or ()), settings.worker_slices or "")
    may_prefill = {"role=prefill", "role=any"} & set(",".join(texts).split(","))
    useless = set(INDEX_KEYS) - ({"node", "engine"} if may_prefill else set())
    if not settings.index and (named := [key for key in found if key in useless]):
        raise ConfigError(
            f"{written}: {', '.join(named)} does nothing without an index: add"
            " --index HOST:PORT, or leave it out"
        )
    for key, (pattern, sentence) in _PATTERNS.items():
        if key in found and not re.fullmatch(pattern, found[key]):
            raise ConfigError(f"{written}: {sentence}")
    return found


def _slices(settings: RouterSettings) -> WorkerAddress | None:
    if (text := settings.worker_slices) is None:
        return None
    written, (place, *pairs) = f"--worker-slices {text!r}", text.split(",")
    namespace, slash, service = place.partition("/")
    name, colon, port = service.partition(":")
    if not (namespace and slash and name and colon and port):
        raise ConfigError(f"{written} must be NAMESPACE/SERVICE:PORT")
    options = _options(written, pairs, SLICE_KEYS, settings)
    scheme = options.pop("scheme", "http")
    if scheme == "http" and not settings.insecure:
        raise ConfigError(
            f"{written} are beyond this machine, and everybody on the way can read prompts: add"
            " scheme=https, or --insecure where the network is trusted"
        )
    return _address(name, f"{scheme}://{namespace}/{name}/{port}", options)


def _tokenizer(text: str) -> tuple[str, Path]:
    model, equals, directory = text.partition("=")
    if not equals or not model or not os.access(directory, os.R_OK | os.X_OK):
        raise ConfigError(
            f"--tokenizer {text!r} must be MODEL=DIRECTORY, a directory that this user can read"
        )
    if not any(any(Path(directory).glob(pattern)) for pattern in TOKENIZER_FILES):
        raise ConfigError(
            f"--tokenizer {text!r}: there is no tokenizer in that directory: name one with a"
            " tokenizer.json, as the model's"
        )
    return model, Path(directory)


def _secret(path: str | None) -> str:
    if not path:
        return ""
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--worker-key-file {path} cannot be read: {error}") from None
    if not secret or not secret.isprintable() or " " in secret:
        raise ConfigError(f"--worker-key-file {path} must hold one API key")
    return secret
