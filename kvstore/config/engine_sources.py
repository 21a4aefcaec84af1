"""Sources of the KV events that a node reads: --engine-events, and the Hello of an engine.

Ways to be wrong, each a ConfigError that says how to mend it: no NAME=ENDPOINT; an unknown or empty
setting behind it; no space, or one that is not 64 hex digits; a rank that is no number; an endpoint
that is none, or beyond this machine without --insecure; an engine and rank twice; too many.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from kvstore.config.values import address_of, joined
from kvstore.errors import ConfigError
from kvstore.types import KEY_BYTES, EngineSource, SpaceId

ENGINE_COUNT_MAX: Final = 64
RANK_MAX: Final = 65535
NAME_BYTES_MAX: Final = 255
IPC_PATH_BYTES_MAX: Final = 107
DEFAULT_TENANT: Final = "default"
DEFAULT_SEED: Final = "vllm-none-hash"
"""Hash seed of an engine without PYTHONHASHSEED."""
EXAMPLE: Final = "gpu0=ipc:///run/kvstore/gpu0.kv,space=3f9a…"
_SETTINGS: Final = ("replay", "space", "tenant", "rank", "seed")


def parse_sources(texts: Sequence[str], *, insecure: bool) -> tuple[EngineSource, ...]:
    """Sources of KV events in --engine-events. Raises ConfigError."""
    sources = tuple(_source(text, insecure=insecure) for text in texts)
    if len(sources) > ENGINE_COUNT_MAX:
        raise ConfigError(f"engine-events names {ENGINE_COUNT_MAX} engines at most")
    if len({(source.engine, source.rank) for source in sources}) != len(sources):
        raise ConfigError(
            "engine-events names an engine twice: give each another NAME, or its data-parallel"
            " ranks rank=0, rank=1 and so on"
        )
    return sources


def check_endpoint(text: str, *, insecure: bool) -> str:
    """An endpoint as ZeroMQ connects to it. Raises ConfigError."""
    kind, _, place = text.partition("://")
    if kind == "ipc" and place.startswith("/") and len(os.fsencode(place)) <= IPC_PATH_BYTES_MAX:
        return text
    found = address_of(place) if kind == "tcp" else None
    if found is None or not found.port or found.is_unspecified:
        raise ConfigError(
            f"KV events of an engine cannot be read at {text!r}: it must be ipc:///PATH or"
            " tcp://ADDRESS:PORT, such as tcp://127.0.0.1:5557"
        )
    if not found.is_loopback and not insecure:
        raise ConfigError(
            f"KV events at {found.host} come from another machine without TLS or authentication:"
            " use ipc:// or 127.0.0.1, or add --insecure if intended"
        )
    return f"tcp://{joined(*found)}"


def _source(text: str, *, insecure: bool) -> EngineSource:
    first, *others = text.split(",")
    name, _, endpoint = first.partition("=")
    if not name or not endpoint or len(name.encode()) > NAME_BYTES_MAX:
        raise ConfigError(
            f"engine-events {text!r} must be NAME=ENDPOINT,space=HEX, such as {EXAMPLE}"
        )
    settings: dict[str, str] = {}
    for other in others:
        setting, _, value = other.partition("=")
        if setting not in _SETTINGS or not value or setting in settings:
            raise ConfigError(
                f"engine-events {text!r}: {other!r} must be one of {'=…, '.join(_SETTINGS)}=…, each"
                " once"
            )
        settings[setting] = value
    replay = settings.get("replay", "")
    return EngineSource(
        engine=name,
        rank=_rank(settings.get("rank", "0")),
        endpoint=check_endpoint(endpoint, insecure=insecure),
        replay_endpoint=check_endpoint(replay, insecure=insecure) if replay else "",
        tenant=settings.get("tenant", DEFAULT_TENANT),
        space=_space(settings.get("space", ""), text),
        hash_seed=settings.get("seed", DEFAULT_SEED),
    )


def _rank(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > RANK_MAX:
        raise ConfigError(f"engine-events: rank {text!r} must be a data-parallel rank, such as 0")
    return int(text)


def _space(text: str, whole: str) -> SpaceId:
    try:
        space = bytes.fromhex(text)
    except ValueError:
        space = b""
    if len(space) != KEY_BYTES:
        raise ConfigError(
            f"engine-events {whole!r}: give it space=HEX, {2 * KEY_BYTES} hex digits by which the"
            " index is asked about this model, the same on all nodes"
        )
    return SpaceId(space)
