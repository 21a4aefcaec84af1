"""Counts since the start of the node. Read by /metrics; only the engine adds."""

from __future__ import annotations

import msgspec


class Counters(msgspec.Struct):
    """Plain integers; the unit is in the name."""

    blocks_distrusted: int = 0
    blocks_granted: int = 0
    blocks_kept: int = 0
    blocks_verified: int = 0
    evictions: int = 0
    fetch_blocks_lost: int = 0
    fetched_blocks: int = 0
    file_blocks_crowded: int = 0
    file_blocks_damaged: int = 0
    file_blocks_not_admitted: int = 0
    file_blocks_over_budget: int = 0
    file_blocks_read: int = 0
    file_blocks_unread: int = 0
    file_blocks_written: int = 0
    file_reads_late: int = 0
    file_writes_dropped: int = 0
    grants_refused: int = 0
    hbm_blocks_demoted: int = 0
    hbm_blocks_dropped: int = 0
    hbm_blocks_leased: int = 0
    hbm_blocks_promoted: int = 0
    lease_asks: int = 0
    leased_bytes: int = 0
    leases_expired: int = 0
    served_bytes: int = 0
    served_blocks_changed: int = 0
    served_blocks: int = 0
    servings_expired: int = 0
    locates: int = 0
    pins_refused: int = 0
    prepared_blocks: int = 0
    prepares: int = 0
    protocol_refusals: int = 0
    push_blocks_damaged: int = 0
    push_blocks_landed: int = 0
    push_words_dropped: int = 0
    pushed_blocks: int = 0
    pushed_bytes: int = 0
    pushes_cut_short: int = 0
    sessions_opened: int = 0
    shadow_blocks: int = 0
    shadow_blocks_diverged: int = 0
    slots_quarantined: int = 0
    stale_slots: int = 0
    stored_bytes: int = 0
    stores_dropped: int = 0
    stores_joined: int = 0
    stores_sealed: int = 0
