"""The keys of `kv_connector_extra_config`: one frozen tree, unknown keys are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from kvstore.client.core.plan import Store
from kvstore.connector.prompts import Images
from kvstore.wire.bounds import NAME_BYTES_MAX
from kvstore.wire.load import is_base_url
from kvstore.wording import why_not

ROLES: Final = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
"""Roles for routers, by `kv_role`."""


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
    try:
        config = msgspec.convert(dict(extra), ConnectorConfig)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"kv_connector_extra_config in --kv-transfer-config: {why_not(error, ConnectorConfig)}"
        ) from None
    size = len(config.tenant.encode())
    if size > NAME_BYTES_MAX:
        raise ValueError(
            f"kv_connector_extra_config in --kv-transfer-config: tenant has {size} bytes in UTF-8;"
            f" at most {NAME_BYTES_MAX}"
        )
    if config.address and not is_base_url(config.address):
        raise ValueError(
            f"kv_connector_extra_config in --kv-transfer-config: address {config.address!r} must be"
            " http:// or https://, a host and a port, such as http://10.0.0.7:8000"
        )
    return config
