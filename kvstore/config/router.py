"""The configuration of `kvstore router`: from its settings to a checked RouterConfig.

    NAME=URL[,KEY=VALUE…] ─▶ WorkerText       addresses beyond this machine need TLS or --insecure

Does not cover: contents of the policy file (`kvstore.routing.policy`) and of API keys
(`kvstore.router.front.tenants`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from kvstore.client.index import address_parts
from kvstore.client.tls import Tls, load_listening
from kvstore.config.addresses import HttpConfig, address_of, http_config
from kvstore.config.cluster import INDEX_COUNT_MAX, is_installed, resolve_tls
from kvstore.config.reading import load_settings
from kvstore.config.settings import RouterSettings
from kvstore.errors import ConfigError
from kvstore.units import parse_size
from kvstore.wire.load import is_base_url

KINDS: Final = ("vllm", "sglang", "tgi", "trtllm", "triton", "llamacpp", "ollama", "openai")
ROLES: Final = ("both", "prefill", "decode", "any")
KEYS: Final = ("kind", "pool", "node", "engine", "tenant", "space", "block", "seed", "role", "rank")
INDEX_KEYS: Final = ("node", "engine", "tenant", "space", "seed", "rank")
"""Options that mean nothing without an index."""
TOKENIZER_FILES: Final = ("tokenizer*", "vocab*", "*.model", "tekken.json")
SLICE_KEYS: Final = (*KEYS, "scheme")
RECEIPT_BYTES: Final = 256 << 20
BODY_BYTES_MIN: Final = 1 << 10
BODY_BYTES_MAX: Final = 1 << 30


@dataclass(frozen=True, kw_only=True)
class WorkerText:
    """An engine as an operator writes it."""

    name: str
    url: str
    options: Mapping[str, str] = field(default_factory=dict)
    """Values of `KEYS`."""


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Checked."""

    host: str
    port: int
    tls: Tls | None
    """In the cluster; None: plain."""
    front: Tls | None
    """Towards clients of `host` and `port`; None: plain HTTP."""
    insecure: bool
    route: tuple[str, int] | None
    picker: tuple[str, int] | None
    api_keys: Path | None
    body_bytes_max: int
    connections_max: int
    allowed_origins: tuple[str, ...]
    """`*`: all; empty: none."""
    drain_delay_s: int
    drain_timeout_s: int
    policy: Path | None
    receipts: Path | None
    receipts_bytes_max: int
    workers: tuple[WorkerText, ...]
    names: tuple[WorkerText, ...]
    """Names in DNS."""
    slices: WorkerText | None
    """Its URL has the scheme `kubernetes`."""
    worker_ca: Path | None
    worker_key: str
    tokenizers: Mapping[str, Path]
    """Model → directory."""
    indexes: tuple[str, ...]
    index_timeout_s: float
    peer_routers: tuple[str, ...]
    """Addresses or names, without those of this router or with them."""
    share_port: bool
    http: HttpConfig | None
    log_level: str


def load_router_config(path: Path | None, flags: Mapping[str, Any]) -> RouterConfig:
    """Raises ConfigError: one sentence, and how to mend it."""
    settings = load_settings(path, flags, RouterSettings)
    if not is_installed("aiohttp"):
        raise ConfigError(
            "the router needs aiohttp, not installed here: pip install 'kvstore-llm[node,router]'"
        )
    tls = None
    if settings.ca or settings.cert or settings.key:
        tls = resolve_tls(settings, what="the router")
    given = settings.index or []
    indexes = [given] if isinstance(given, str) else given
    _check_indexes(indexes, is_certified=tls is not None, insecure=settings.insecure)
    if not indexes:
        refuse_names_in_the_index(settings)
    front, is_plain = _front(settings, tls), tls is None and not settings.insecure
    listen = _listen("--listen", settings.listen, is_plain=is_plain and front is None)
    receipts, receipts_bytes = _receipts(settings.receipts)
    return RouterConfig(
        host=listen[0],
        port=listen[1],
        tls=tls,
        front=front,
        insecure=settings.insecure,
        route=_maybe("--route-listen", settings.route_listen, is_plain=is_plain),
        picker=_maybe("--picker-listen", settings.picker_listen, is_plain=is_plain),
        api_keys=Path(settings.api_keys) if settings.api_keys else None,
        body_bytes_max=_size("body-max", settings.body_max),
        connections_max=settings.connections,
        allowed_origins=_origins(settings.allowed_origins),
        drain_delay_s=settings.drain_delay,
        drain_timeout_s=settings.drain_timeout,
        policy=Path(settings.policy) if settings.policy else None,
        receipts=receipts,
        receipts_bytes_max=receipts_bytes,
        workers=_workers(settings, insecure=settings.insecure),
        names=tuple(
            worker_of("--worker-dns", text, insecure=settings.insecure, is_name=True)
            for text in settings.worker_dns or ()
        ),
        slices=_slices(settings.worker_slices, insecure=settings.insecure),
        worker_ca=Path(settings.worker_ca) if settings.worker_ca else None,
        worker_key=_secret(settings.worker_key_file),
        tokenizers=dict(map(_tokenizer, settings.tokenizer or ())),
        indexes=tuple(indexes),
        index_timeout_s=settings.index_timeout / 1000,
        peer_routers=_peers(settings, tls),
        share_port=settings.share_port,
        http=http_config(settings.metrics, beyond_loopback=settings.metrics_beyond_loopback),
        log_level=settings.log_level,
    )


def _origins(given: Sequence[str] | None) -> tuple[str, ...]:
    if given is None:
        return ("*",)
    if list(given) == ["none"]:
        return ()
    for origin in given:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/,]+", origin.lower()):
            raise ConfigError(
                f"--allowed-origins {origin!r} must be * or an origin such as https://chat.example,"
                " or none"
            )
    return tuple(origin.lower() for origin in given)  # as browsers send them


def _front(settings: RouterSettings, tls: Tls | None) -> Tls | None:
    """Certificate that clients see, and the CA of theirs: those of the cluster where no others are
    given."""
    ca = settings.listen_ca or settings.ca
    if settings.listen_cert is None or settings.listen_key is None:
        if settings.listen_ca is None:
            return tls
        assert settings.cert is not None
        assert settings.key is not None
        cert, key = settings.cert, settings.key
    else:
        cert, key = settings.listen_cert, settings.listen_key
    if ca is None and settings.api_keys is None:
        raise ConfigError(
            "--listen-cert alone would admit every client: add --api-keys, or --listen-ca with"
            " the CA of client certificates"
        )
    return load_listening(Path(cert), Path(key), ca_path=Path(ca) if ca else None)


def _workers(settings: RouterSettings, *, insecure: bool) -> tuple[WorkerText, ...]:
    found = [worker_of("--worker", text, insecure=insecure) for text in settings.worker or ()]
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--worker names {name!r} twice: each engine needs its own name")
    if not (found or settings.worker_dns or settings.worker_slices or settings.index):
        raise ConfigError(
            "name the engines: --worker NAME=URL, --worker-dns, --worker-slices, or --index whose"
            " nodes list theirs"
        )
    if len(found) == sum(each.options.get("role") == "prefill" for each in found) > 0 and not (
        settings.worker_dns or settings.worker_slices or settings.index
    ):
        raise ConfigError("--worker names prefillers only: add an engine with role=decode or both")
    return tuple(found)


def refuse_names_in_the_index(settings: RouterSettings) -> None:
    """A router without an index needs no names in it; between prefill and decode engines `node` and
    `engine` lead the blocks all the same. Raises ConfigError."""
    slices = [settings.worker_slices] if settings.worker_slices else []
    given = {"worker": settings.worker, "worker-dns": settings.worker_dns, "worker-slices": slices}
    options = [pair for texts in given.values() for text in texts or () for pair in text.split(",")]
    may_prefill = {"role=prefill", "role=any"} & set(options)
    useful = {"node", "engine"} if may_prefill else set()
    for flag, texts in given.items():
        for text in texts or ():
            keys = [pair.partition("=")[0] for pair in text.split(",")[1:]]
            if named := [key for key in keys if key in INDEX_KEYS and key not in useful]:
                raise ConfigError(
                    f"--{flag} {text!r}: {', '.join(named)} does nothing without an index: add"
                    " --index HOST:PORT, or leave it out"
                )


def worker_of(option: str, text: str, *, insecure: bool, is_name: bool = False) -> WorkerText:
    """An engine of NAME=URL[,KEY=VALUE…]; of URL[,…] when the host `is_name` of several engines.

    Raises:
        ConfigError: it is none, or it is beyond this machine without TLS.
    """
    address, *pairs = text.split(",")
    name, equals, url = ("dns", "=", address) if is_name else address.partition("=")
    if not equals or not name or not name.isprintable() or not is_base_url(url):
        form = "a URL, such as http://vllm" if is_name else "NAME=URL, such as a=http://127.0.0.1"
        raise ConfigError(f"{option} {text!r} must be {form}:8000")
    options = dict(_pair(option, text, pair) for pair in pairs)
    if options.get("kind", "vllm") not in KINDS:
        raise ConfigError(f"{option} {text!r}: kind is one of {', '.join(KINDS)}")
    if options.get("role", "both") not in ROLES:
        raise ConfigError(f"{option} {text!r}: role is one of {', '.join(ROLES)}")
    for key in ("block", "rank"):
        if not options.get(key, "0").isdecimal():
            raise ConfigError(f"{option} {text!r}: {key} is a number")
    if not re.fullmatch(r"(?:[0-9a-f]{64})?", options.get("space", "")):
        raise ConfigError(f"{option} {text!r}: space has 64 hex digits, as 'kvstore inspect' shows")
    if is_exposed(url, is_name=is_name) and not insecure:
        raise ConfigError(
            f"{option} {url} is beyond this machine, and everybody on the way can read prompts: use"
            " https://, or --insecure where the network is trusted"
        )
    return WorkerText(name=name, url=url.rstrip("/"), options=options)


def _pair(option: str, text: str, pair: str, keys: Sequence[str] = KEYS) -> tuple[str, str]:
    key, equals, value = pair.partition("=")
    if key not in keys or not equals or not value:
        raise ConfigError(f"{option} {text!r}: after the URL come KEY=VALUE of {', '.join(keys)}")
    return key, value


def is_exposed(url: str, *, is_name: bool = False) -> bool:
    """Whether prompts that are sent there can be read on the way."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    found = address_of(f"[{host}]:1" if ":" in host else f"{host}:1")
    is_loopback = found is not None and found[0].is_loopback and not is_name
    return parts.scheme == "http" and not (is_loopback or host == "localhost")  # RFC 6761


def _slices(text: str | None, *, insecure: bool) -> WorkerText | None:
    if text is None:
        return None
    place, *pairs = text.split(",")
    namespace, slash, service = place.partition("/")
    name, colon, port = service.partition(":")
    if not (namespace and slash and name and colon and port):
        raise ConfigError(f"--worker-slices {text!r} must be NAMESPACE/SERVICE:PORT")
    options = dict(_pair("--worker-slices", text, pair, SLICE_KEYS) for pair in pairs)
    if options.get("scheme") != "https" and not insecure:
        raise ConfigError(
            f"--worker-slices {text!r} are beyond this machine, and everybody on the way can read"
            " prompts: add scheme=https, or --insecure where the network is trusted"
        )
    return WorkerText(name=name, url=f"kubernetes://{namespace}/{name}/{port}", options=options)


def _tokenizer(text: str) -> tuple[str, Path]:
    model, equals, directory = text.partition("=")
    if not equals or not model or not Path(directory).is_dir():
        raise ConfigError(f"--tokenizer {text!r} must be MODEL=DIRECTORY, and the directory exist")
    if not any(any(Path(directory).glob(pattern)) for pattern in TOKENIZER_FILES):
        raise ConfigError(
            f"--tokenizer {text!r}: there is no tokenizer in that directory: name one with a"
            " tokenizer.json, as the model's"
        )
    return model, Path(directory)


def _listen(option: str, text: str, *, is_plain: bool) -> tuple[str, int]:
    found = address_of(text)
    if found is None:
        raise ConfigError(
            f"{option} {text!r} must be an IP address and a port, such as 10.0.0.9:8443"
        )
    if is_plain and not found[0].is_loopback:
        raise ConfigError(
            f"{option} {text} can be reached from other machines: give --ca, --cert and --key, or"
            " --insecure: no encryption, for labs"
        )
    return str(found[0]), found[1]


def _maybe(option: str, text: str | None, *, is_plain: bool) -> tuple[str, int] | None:
    return None if text is None else _listen(option, text, is_plain=is_plain)


def _check_indexes(texts: Sequence[str], *, is_certified: bool, insecure: bool) -> None:
    if len(texts) > INDEX_COUNT_MAX or len(set(texts)) != len(texts):
        raise ConfigError(f"index names up to {INDEX_COUNT_MAX} replicas, each once")
    for text in texts:
        address_parts(text)
    if texts and not (is_certified or insecure):
        raise ConfigError("--index needs TLS: give --ca, --cert and --key, or --insecure in a lab")


def _peers(settings: RouterSettings, tls: Tls | None) -> tuple[str, ...]:
    texts = tuple(settings.peer_router or ())
    for text in texts:
        address_parts(text, what="--peer-router")
    if texts and tls is None and not settings.insecure:
        raise ConfigError(
            "--peer-router needs TLS: give --ca, --cert and --key, or --insecure in a lab"
        )
    if texts and tls is not None and not tls.name_as("client"):
        raise ConfigError(
            "--peer-router needs a --cert with a name in the role client, the same in all routers:"
            " kvstore certs DIRECTORY --client NAME"
        )
    return texts


def _receipts(text: str | None) -> tuple[Path | None, int]:
    if not text:
        return None, RECEIPT_BYTES
    name, colon, size = text.rpartition(":")
    path = Path(name if colon else text)
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"--receipts {path} must be a file, in a directory that exists")
    return path, _size("receipts", size) if colon else RECEIPT_BYTES


def _size(key: str, text: str | int) -> int:
    try:
        size = parse_size(str(text))
    except ValueError:
        size = -1
    if not BODY_BYTES_MIN <= size <= BODY_BYTES_MAX:
        raise ConfigError(f"{key} {text!r} must be a size from 1KiB to 1GiB, such as 32MiB")
    return size


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
