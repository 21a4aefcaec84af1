"""Defaults and limits in help texts. Imports nothing, so that a command starts at once."""

from __future__ import annotations

from typing import Final

DEFAULT_SOCKET: Final = "/run/kvstore/node.sock"
DEFAULT_METRICS: Final = "127.0.0.1:9464"
EXAMPLE_EVENTS: Final = "ipc:///run/kvstore/events"
DEFAULT_LISTEN: Final = "127.0.0.1:9470"
"""Address of an index replica."""
DEFAULT_INDEX_METRICS: Final = "127.0.0.1:9471"
DEFAULT_ROUTER_LISTEN: Final = "127.0.0.1:8080"
DEFAULT_ROUTER_METRICS: Final = "127.0.0.1:9472"
DEFAULT_TENANT: Final = "default"
DEFAULT_ENTRIES: Final = 10_000_000
ENTRIES_MIN: Final = 1 << 16
ENTRIES_MAX: Final = 1 << 29
CERTIFICATE_DAYS: Final = 365
TOPICS: Final = (
    *("nodes", "tiers", "curve", "savings", "spaces", "blocks", "leases", "jobs", "transfers"),
    "prefix",
)
"""Topics of `kvstore inspect`."""
BLOCKS_LISTED: Final = 100
REQUESTS_LISTED: Final = 20
BLOCK_ROWS_MAX: Final = 1000
"""Rows of one Blocks reply: about 10 ms of the loop."""
REQUEST_ROWS_MAX: Final = 100
PREFIX_KEYS_MAX: Final = 1024
REPLY_BYTES_MAX: Final = 4 << 20
