"""Counts since the start of the node. Read by /metrics; only the engine adds."""

from __future__ import annotations


class Counters:
    """Plain integers; the unit is in the name."""

    __slots__ = (
        "blocks_distrusted",
        "blocks_granted",
        "blocks_hit",
        "blocks_kept",
        "blocks_missed",
        "blocks_verified",
        "evictions",
        "fetch_blocks_lost",
        "fetched_blocks",
        "file_blocks_crowded",
        "file_blocks_damaged",
        "file_blocks_not_admitted",
        "file_blocks_over_budget",
        "file_blocks_read",
        "file_blocks_unread",
        "file_blocks_written",
        "file_reads_late",
        "file_writes_dropped",
        "grants_refused",
        "lease_asks",
        "leased_bytes",
        "leases_expired",
        "lent_bytes",
        "loan_blocks_changed",
        "loaned_blocks",
        "loans_expired",
        "locates",
        "pins_refused",
        "protocol_refusals",
        "sessions_opened",
        "shadow_blocks",
        "shadow_blocks_diverged",
        "slots_quarantined",
        "stale_slots",
        "stored_bytes",
        "stores_dropped",
        "stores_joined",
        "stores_sealed",
    )

    def __init__(self) -> None:
        self.blocks_distrusted = 0
        self.blocks_granted = 0
        self.blocks_hit = 0
        self.blocks_kept = 0
        self.blocks_missed = 0
        self.blocks_verified = 0
        self.evictions = 0
        self.file_blocks_crowded = 0
        self.file_blocks_damaged = 0
        self.file_blocks_not_admitted = 0
        self.file_blocks_over_budget = 0
        self.file_blocks_read = 0
        self.file_blocks_unread = 0
        self.file_blocks_written = 0
        self.file_reads_late = 0
        self.fetch_blocks_lost = 0
        self.fetched_blocks = 0
        self.file_writes_dropped = 0
        self.grants_refused = 0
        self.lease_asks = 0
        self.leased_bytes = 0
        self.leases_expired = 0
        self.lent_bytes = 0
        self.loan_blocks_changed = 0
        self.loaned_blocks = 0
        self.loans_expired = 0
        self.locates = 0
        self.pins_refused = 0
        self.protocol_refusals = 0
        self.sessions_opened = 0
        self.shadow_blocks = 0
        self.shadow_blocks_diverged = 0
        self.slots_quarantined = 0
        self.stale_slots = 0
        self.stored_bytes = 0
        self.stores_dropped = 0
        self.stores_joined = 0
        self.stores_sealed = 0
