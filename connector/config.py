"""What an operator may write into `kv_connector_extra_config`: one frozen tree, no unknown keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from kvstore.client.core.config import Store
from kvstore.connector.media import Images
from kvstore.wire.bounds import NAME_BYTES_MAX
from kvstore.wording import why_not


class ConnectorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of `kv_connector_extra_config`, with defaults that suit most."""

    socket: Annotated[str, msgspec.Meta(min_length=1, max_length=100)] = "/run/kvstore/node.sock"
    """The node's attach socket; the default is the node's own."""
    tenant: Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_BYTES_MAX)] = "default"
    store: Store = "all"
    images: Images = "hashed"
    """Requests with images and the like: those whose items are named by a hash; or none."""
    min_load_tokens: Annotated[int, msgspec.Meta(ge=0)] = 128
    """Shorter hits are computed."""
    lookup_deadline_ms: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 20
    heartbeat_timeout_ms: Annotated[int, msgspec.Meta(ge=100, le=10_000)] = 250
    verify_every: Annotated[int, msgspec.Meta(ge=0)] = 1
    """Every n-th load is checked against its checksums: 1 every load, 0 none."""
    shadow_every: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Every n-th hit is computed all the same and compared with what the cache holds; 0: none."""
    log_requests: bool = False
    """One log line a request: what was loaded, and why not more."""


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
    return config
