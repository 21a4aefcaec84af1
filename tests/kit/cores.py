"""What tests ask of cores, and nobody else."""

from __future__ import annotations

from typing import Any

import msgspec

from kvstore.client.core.plan import SchedulerConfig
from kvstore.client.core.rank import RankCore
from kvstore.client.core.scheduler import SchedulerCore
from kvstore.wire.messages import PROTOCOL_VERSION, HelloScheduler

_HELLO = HelloScheduler(PROTOCOL_VERSION, "e", "n", "t", 1, "p")


def core_config(**fields: Any) -> SchedulerConfig:
    """The configuration of a scheduler side with these fields, of it or of its Hello."""
    own = {name: its for name, its in fields.items() if name in SchedulerConfig.__struct_fields__}
    told = {name: its for name, its in fields.items() if name not in own}
    return SchedulerConfig(hello=msgspec.structs.replace(_HELLO, **told), **own)


def is_serving(core: SchedulerCore) -> bool:
    """Attached, session open, breakers closed."""
    lookups = core.lookups
    is_off = lookups._breaker.is_open or lookups._copies.is_open
    return core.attachment.session != 0 and not is_off


def reading(core: RankCore) -> set[int]:
    """Engine blocks that a queued or running store has yet to read."""
    return {block for job in core._stores for block in job.remaining}


def has_work(core: RankCore) -> bool:
    """A job is queued or runs."""
    return bool(core._loads or core._stores)
