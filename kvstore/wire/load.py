"""What a node does, in numbers: told with its beats, shown by `kvstore top`.

Counts are since the node process began, so that whoever looks makes rates of his own, over as long
as he likes; `at_ms` is what they are divided by. No names, keys or tenants are in it.
"""

from __future__ import annotations

import msgspec


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One node, at one moment."""

    at_ms: int = 0
    """Of its own clock, which does not go back while it lives."""
    dram_bytes: int = 0
    dram_used_bytes: int = 0
    file_bytes: int = 0
    file_used_bytes: int = 0
    blocks_hit: int = 0
    """Since it began, here and below, but for those at the end."""
    blocks_missed: int = 0
    stored_bytes: int = 0
    leased_bytes: int = 0
    """To engines, which load them."""
    fetched_bytes: int = 0
    """From other nodes."""
    lent_bytes: int = 0
    """To other nodes."""
    fetch_p50_us: int = 0
    """Of all fetches."""
    fetch_p99_us: int = 0
    leases: int = 0
    """Now, as the rest."""
    engines: int = 0
    slots_quarantined: int = 0
    replicas: int = 0
    """Of the index, that it is to tell."""
    replicas_reached: int = 0
