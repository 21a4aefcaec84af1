"""What tests ask of cores, and nobody else."""

from __future__ import annotations

from kvstore.client.core.rank import RankCore
from kvstore.client.core.scheduler import SchedulerCore


def is_serving(core: SchedulerCore) -> bool:
    """Attached, session open, breakers closed."""
    lookups = core.lookups
    is_off = lookups._breaker.is_open or lookups._copies.is_open
    return core.attachment.session != 0 and not is_off


def has_work(core: RankCore) -> bool:
    """A job is queued or runs."""
    return bool(core._loads or core._stores)
