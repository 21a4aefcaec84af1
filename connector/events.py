"""Where the engine publishes its KV events, as its node connects to it.

Covers: --kv-events-config to two addresses. Does not cover: reading them (the node does).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config.kv_events import KVEventsConfig

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
