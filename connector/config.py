"""Settings of the connector: the keys of `kv_connector_extra_config`, one frozen tree of which
unknown keys are refused; and where the engine publishes its KV events, as its node connects to it
(--kv-events-config). Does not cover: reading the events (the node does).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from kvstore.client.core.plan import Store
from kvstore.wire.bounds import NAME_BYTES_MAX
from kvstore.wire.load import is_base_url
from kvstore.wording import why_not

if TYPE_CHECKING:
    from vllm.config.kv_events import KVEventsConfig


ROLES: Final = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
"""Roles for routers, by `kv_role`."""


Images = Literal["hashed", "none"]


class ConnectorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of `kv_connector_extra_config`, with defaults that suit most."""

    socket: Annotated[str, msgspec.Meta(min_length=1, max_length=100)] = "/run/kvstore/node.sock"
    """Attach socket of the node."""
    tenant: Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_BYTES_MAX)] = "default"
    """Name of the tenant; engines share blocks within a tenant only."""
    store: Store = "all"
    """Blocks to store. `all`: every full block; `prompt`: none that fill during decoding; `none`:
    load only."""
    images: Images = "hashed"
    """Requests with images, video or audio. `hashed`: served if vLLM's content hash names every
    item, computed if a client supplied its own `uuid` (`explain` shows it); `none`: always
    computed, for clients that may forge hashes."""
    min_load_tokens: Annotated[int, msgspec.Meta(ge=0)] = 128
    """Least number of tokens to load; shorter hits are computed."""
    lookup_deadline_ms: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 20
    """Longest wait for a lookup: this, or 4 % of the estimated prefill time if that is more; at
    most `heartbeat_timeout_ms`."""
    heartbeat_timeout_ms: Annotated[int, msgspec.Meta(ge=100, le=10_000)] = 250
    """Age of the heartbeat at which the engine treats the node as down and computes. Caching
    resumes with the next heartbeat; after eight times this age the engine attaches anew."""
    address: Annotated[str, msgspec.Meta(max_length=NAME_BYTES_MAX)] = ""
    """URL of this engine's HTTP server as routers reach it, such as `http://10.0.0.7:8000`: a
    `kvstore router` with `--index` finds the engine by it. Empty: the router's flags name it."""
    push_deadline_ms: Annotated[int, msgspec.Meta(ge=1, le=600_000)] = 60_000
    """Longest wait of a request with `do_remote_prefill` for the blocks that a prefill node sends;
    after it, or when the prefill engine has stored nothing for 10 s (for three times the longest
    wait so far, if that is more), the prompt is computed from the first missing block on."""
    verify_every: Annotated[int, msgspec.Meta(ge=0)] = 1
    """Checksum verification of loads. 1: every load; n: every n-th; 0: none."""
    shadow_every: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Shadow check of every n-th hit: recomputed and compared with the cached blocks. A
    difference switches the model's space off, and `/healthz` names it. 0: none."""
    log_requests: bool = False
    """One log line per request with the tokens loaded and the reason for the rest."""


def parse_config(extra: Mapping[str, object]) -> ConnectorConfig:
    """The configuration of one engine.

    Raises:
        ValueError: a key is unknown, or its value cannot be; the sentence names it.
    """
    where = "kv_connector_extra_config in --kv-transfer-config:"
    try:
        config = msgspec.convert(dict(extra), ConnectorConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where} {why_not(error, ConnectorConfig)}") from None
    size = len(config.tenant.encode())
    if size > NAME_BYTES_MAX:
        raise ValueError(f"{where} tenant has {size} bytes in UTF-8; at most {NAME_BYTES_MAX}")
    if config.address and not is_base_url(config.address):
        raise ValueError(
            f"{where} address {config.address!r} must be http:// or https://, a host and a port,"
            " such as http://10.0.0.7:8000"
        )
    return config


# ── KV events ─────────────────────────────────────────────────────────────────────────────────────

logger = logging.getLogger("vllm.kvstore")
_ANY_HOST = ("*", "0.0.0.0", "[::]")  # noqa: S104 - what an engine listens on, not we


def event_endpoints(config: KVEventsConfig | None, data_rank: int) -> tuple[str, str]:
    """(events, replay) of this data-parallel rank; replay may be empty, both are if the node cannot
    read the events. A warning is logged if a setting is the cause."""
    if config is None or not config.enable_kv_cache_events or config.publisher != "zmq":
        return "", ""
    from vllm.distributed.kv_events import ZmqEventPublisher

    # vllm connects to every other address, where some collector listens.
    listens = "*" in config.endpoint or "::" in config.endpoint or config.endpoint[:6] == "ipc://"
    if config.endpoint[:6] == "ipc://" and data_rank:
        listens = False  # vllm has no ipc:// for several ranks, and will refuse it
    if not listens or config.endpoint.endswith(":0"):
        logger.warning(
            "kvstore: KV events at %s are not read by the node, so that the index does not know "
            'what the engine\'s own memory holds: give --kv-events-config an "endpoint" such as '
            "ipc:///run/kvstore/engine.kv or tcp://*:5557",
            config.endpoint,
        )
        return "", ""
    offset = ZmqEventPublisher.offset_endpoint_port
    replay = offset(config.replay_endpoint, data_rank)
    return _reached(offset(config.endpoint, data_rank) or ""), _reached(replay or "")


def _reached(endpoint: str) -> str:
    """The address that reaches a listening `endpoint` from this machine."""
    kind, separator, place = endpoint.partition("://")
    host, colon, port = place.rpartition(":")
    if kind == "tcp" and host in _ANY_HOST:
        host = "[::1]" if host == "[::]" else "127.0.0.1"
    return f"{kind}{separator}{host}{colon}{port}"
