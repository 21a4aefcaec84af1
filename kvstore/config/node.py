"""The configuration of a node: its settings, and what is made of them on this machine.

Covers: sizes that fit the machine, the sentence an operator reads when one does not. Does not
cover: the table (`settings`), addresses (`values`), the cluster (`cluster`).

Ways to be wrong, each a ConfigError that says how to mend it: those of `reading`; text that is no
size; dram larger than the memory there is; slab larger than dram; an address beyond loopback
without the opt-in; events on an invalid address; quotas that are no shares, or more than there is;
a disk tier that is no PATH:SIZE or too small; a scrub that is no rate; a landing slab that
leaves too little; limits of writes too small for a block.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstore.client.tls import PORT_MAX
from kvstore.config.cluster import ClusterConfig, resolve_cluster
from kvstore.config.defaults import EXAMPLE_EVENTS
from kvstore.config.machine import available_memory, refuse_what_cannot_hold
from kvstore.config.reading import load_settings
from kvstore.config.settings import NodeSettings
from kvstore.config.values import address_of, joined, size_of, socket_path
from kvstore.errors import ConfigError
from kvstore.tiers.file.config import AUTO, FileConfig, ScrubRate
from kvstore.types import MOVING_SHARE, QUOTA_COUNT_MAX, SLOT_BYTES_MIN
from kvstore.units import KIB, MIB, format_size, parse_size

ARENA_BYTES_MIN: Final = 4 * SLOT_BYTES_MIN
SLAB_BYTES_AUTO_MAX: Final = 64 * MIB
LANDING_SHARE: Final = 16
LANDING_BYTES_MAX: Final = 256 * MIB
SCRUB_BYTES_MIN: Final = 64 * KIB


@dataclass(frozen=True, kw_only=True)
class EventsConfig:
    """Publication of KV events; endpoints in the form of ZeroMQ."""

    endpoint: str
    replay_endpoint: str
    node: str
    beyond_loopback: bool
    whole_hashes: bool
    """Hashes of 32 bytes, as from engines with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0."""


class NodeConfig(NodeSettings):
    """The whole configuration of a node, checked: its settings, and what they come to on this
    machine.
    """

    dram_bytes: int
    """Size of the arena; a multiple of SLOT_BYTES_MIN."""
    dram_note: str
    """How `auto` chose the size, for the ready line; empty if the operator chose."""
    hbm_bytes: int
    """Size of the slab of GPU memory; a multiple of `slab_bytes`, 0: none."""
    hbm_gpu: int
    """Number of the GPU with that slab, as CUDA counts for this process."""
    slab_bytes: int
    """Unit in which the arena is divided among slot sizes; a multiple of SLOT_BYTES_MIN."""
    disk: FileConfig | None
    """The disk tier of `file`."""
    scrub_rate: ScrubRate | None
    """Rate of the scrub of dram and disk, each; None: no scrub."""
    published: EventsConfig | None
    """Publication of `events`."""
    cluster: ClusterConfig | None
    """Name, certificates and transport of this node in its cluster; None: it is in none."""
    landing_bytes: int
    """Bytes at the end of the arena that prefill nodes write to, a multiple of the slab size; 0:
    none do.
    """
    quotas: tuple[tuple[str, int], ...]
    """Guaranteed bytes of dram by model label or tenant."""


def load_config(
    path: Path | None, flags: Mapping[str, Any], *, arena: tuple[int, str] | None = None
) -> NodeConfig:
    """The configuration for the settings of `read_settings`.

    `arena`: size and note of the dram, when that was chosen at an earlier start.

    Raises:
        ConfigError: one sentence: the error and how to mend it.
    """
    config = load_settings(path, flags, NodeConfig)
    config.dram_bytes, config.dram_note = arena or _dram(config.dram)
    config.slab_bytes = _slab(config.slab, config.dram_bytes)
    config.hbm_bytes, config.hbm_gpu = _hbm(config.hbm, slab_bytes=config.slab_bytes)
    config.scrub_rate = _scrub(config.scrub)
    if config.node_name is not None and not _has_use_for_a_name(config):
        raise ConfigError(
            "node-name is for a shared directory, for events and for a cluster: add ',shared' to"
            " --file, or --events, or --index, or leave it out"
        )
    config.cluster = resolve_cluster(config)
    if config.cluster is not None and config.cluster.tls is not None:
        config.node_name = config.cluster.node  # in a shared directory and in events, too
    config.disk = disk_of(config, dram_bytes=config.dram_bytes, scrub=config.scrub_rate)
    if config.disk is not None and arena is None:
        refuse_what_cannot_hold(config.disk)  # a later process has memory to serve without its disk
    config.landing_bytes = _landing(config)
    # A block is never larger than a slab: each can be written some day. Its page comes on top.
    least = 2 * config.slab_bytes
    if config.file_writes_per_day is not None and config.file_writes_per_day < least:
        raise ConfigError(
            f"file-writes-per-day of {format_size(config.file_writes_per_day)} is too small: give"
            f" at least {format_size(least)}, two slabs, with its unit, such as 1TiB"
        )
    config.published = _events(config)
    config.quotas = _quotas(config.quota or {}, dram_bytes=config.dram_bytes - config.landing_bytes)
    return config


def _landing(config: NodeConfig) -> int:
    """Bytes of the landing slab, in whole slabs. Raises ConfigError."""
    transport = config.cluster.transport if config.cluster else None
    slab_bytes = config.slab_bytes
    if transport is None or config.landing in (False, "off"):
        return 0
    if config.landing in (None, "auto"):
        size = min(config.dram_bytes // LANDING_SHARE, LANDING_BYTES_MAX)
        return size - size % slab_bytes if transport.takes_writes else 0
    size = size_of("landing", str(config.landing))
    size += -size % slab_bytes
    if size > config.dram_bytes // 2:
        raise ConfigError(
            f"landing of {format_size(size)}, whole slabs of {format_size(slab_bytes)}, is more"
            " than half of dram: choose a smaller --landing or --slab"
        )
    if not transport.takes_writes:
        raise ConfigError(
            f"--transport {transport.name} takes no writes, which --landing is for: leave --landing"
            " out, or choose another transport"
        )
    return size


def _has_use_for_a_name(settings: NodeSettings) -> bool:
    has_events = settings.events not in (False, "off")
    has_cluster = bool(settings.index) or settings.index_listen is not None
    return has_events or has_cluster or (settings.file or "").endswith(",shared")


def disk_of(
    settings: NodeSettings, *, dram_bytes: int, scrub: ScrubRate | None = None
) -> FileConfig | None:
    """Disk tier of PATH:SIZE, with `,shared` behind it for a directory of several nodes; None: no
    disk tier. Raises ConfigError.
    """
    if (text := settings.file) is None:
        return None
    path, colon, size = text.rpartition(":")
    if not colon or not path:
        raise ConfigError(
            f"file {text!r} must be PATH:SIZE or PATH:SIZE,shared, such as /var/lib/kvstore:2TiB"
        )
    size, comma, mode = size.partition(",")
    if comma and mode != "shared":
        raise ConfigError(f"file {text!r} ends in {mode!r}: only 'shared' may stand there")
    return FileConfig(
        directory=Path(path).absolute(),
        capacity_bytes=size_of("file", size),
        shared=bool(comma),
        node=settings.node_name or platform.node(),
        # As much as the engine core may have in motion each way.
        queued_bytes_max=max(FileConfig.queued_bytes_max, dram_bytes // MOVING_SHARE),
        scrub=scrub,
    )


def _scrub(text: str | int | bool) -> ScrubRate | None:
    """Scrub rate of `auto`, `off` (None), or a size in bytes per second and tier. Raises
    ConfigError.
    """
    if text is False or text == "off":  # YAML reads a bare off as false
        return None
    if text == "auto":
        return AUTO
    try:
        size = parse_size(str(text))
    except ValueError:
        size = 0
    if size < SCRUB_BYTES_MIN:
        raise ConfigError(
            f"scrub {text!r} must be the bytes to read per second and tier, at least"
            f" {format_size(SCRUB_BYTES_MIN)}, such as 64MiB, or auto, or off"
        )
    return ScrubRate(size, daily=False)


def _dram(text: str | int) -> tuple[int, str]:
    """(bytes, sentence how `auto` chose them, or empty). Raises ConfigError."""
    available, source = available_memory()
    note = ""
    if text == "auto":
        size = available // 2
        note = f"half of the {format_size(available)} that {source} has available"
    else:
        size = size_of("dram", text)
    size -= size % SLOT_BYTES_MIN
    if size < ARENA_BYTES_MIN:
        raise ConfigError(
            f"--dram {text} is too small: give at least {format_size(ARENA_BYTES_MIN)}, with its"
            " unit, such as 64GiB"
        )
    if size > available:
        from kvstore.arena import huge_page_pool  # only here: arenas need numpy

        if size > huge_page_pool()[0]:
            raise ConfigError(
                f"dram of {format_size(size)} is more than the {format_size(available)} that"
                f" {source} has available: choose a smaller --dram, or auto"
            )
    return size, note


def _hbm(text: str | int, *, slab_bytes: int) -> tuple[int, int]:
    """(bytes, GPU number) of SIZE, with `,gpu=N` behind it for another GPU than the first. Raises
    ConfigError.
    """
    found = re.fullmatch(r"([^,:]*)(?:,gpu=(\d{1,3}))?", str(text), re.ASCII)
    if found is None:
        raise ConfigError(f"hbm {text!r} must be SIZE or SIZE,gpu=N, such as 8GiB,gpu=1")
    size = size_of("hbm", found[1])
    if 0 < size < slab_bytes:
        raise ConfigError(
            f"hbm of {format_size(size)} is less than one slab, {format_size(slab_bytes)}: give"
            " more, or a smaller --slab"
        )
    return size - size % slab_bytes, int(found[2] or 0)


def _slab(text: str | int, dram_bytes: int) -> int:
    if text == "auto":
        size = min(SLAB_BYTES_AUTO_MAX, dram_bytes // 4)
        return size - size % SLOT_BYTES_MIN
    size = size_of("slab", text)
    if not SLOT_BYTES_MIN <= size <= dram_bytes or size % SLOT_BYTES_MIN:
        raise ConfigError(
            f"slab of {format_size(size)} must be a multiple of {format_size(SLOT_BYTES_MIN)}"
            f" and at most dram, {format_size(dram_bytes)}: leave it out, or use auto"
        )
    return size


def _quotas(quotas: Mapping[str, str | int], *, dram_bytes: int) -> tuple[tuple[str, int], ...]:
    """(name, bytes) of each NAME: SHARE, where a share is a part of dram (30%) or a size. Raises
    ConfigError.
    """
    if len(quotas) > QUOTA_COUNT_MAX:
        raise ConfigError(f"{len(quotas)} quotas are more than {QUOTA_COUNT_MAX}: give fewer")
    found = []
    for name, text in quotas.items():
        size = 0
        if percent := re.fullmatch(r"(\d{1,3}(?:\.\d+)?) ?%", str(text)):
            size = int(dram_bytes * float(percent[1]) / 100)
        elif str(text):
            size = size_of("quota", text)
        if size == 0 or not name:
            raise ConfigError(
                f"quota {f'{name}={text}'.rstrip('=')} must be NAME=SHARE, such as llama=30% or"
                " llama=20GiB, where NAME is a model's served name or a tenant"
            )
        if size < SLOT_BYTES_MIN:
            raise ConfigError(
                f"quota {name}={text} is {format_size(size)}, less than any block: give a part of"
                " dram with its %, or a size with its unit"
            )
        found.append((name, size))
    if sum(size for _, size in found) > dram_bytes:
        raise ConfigError(
            f"quotas reserve {format_size(sum(size for _, size in found))}, more than dram has,"
            f" {format_size(dram_bytes)}: choose smaller shares"
        )
    return tuple(found)


def _events(settings: NodeSettings) -> EventsConfig | None:
    """Endpoints of ipc:///PATH, with the replay socket at PATH.replay, or of tcp://ADDRESS:PORT,
    with the replay one port above; port 0 lets the kernel choose both. None: off. Raises
    ConfigError.
    """
    text = settings.events
    if text is False or text == "off":
        return None
    kind, _, place = str(text).partition("://")
    found = address_of(place) if kind == "tcp" else None
    if kind == "ipc" and place.startswith("/"):
        ends = [f"ipc://{socket_path('events', place + suffix)}" for suffix in ("", ".replay")]
    elif found is not None and found.port < PORT_MAX:
        ports = (found.port, found.port + 1) if found.port else ("*", "*")
        ends = [f"tcp://{joined(found.host, port)}" for port in ports]
    else:
        raise ConfigError(
            f"events {text!r} must be ipc:///PATH or tcp://ADDRESS:PORT, such as {EXAMPLE_EVENTS},"
            " or off"
        )
    if found is not None and not found.is_loopback and not settings.insecure:
        raise ConfigError(
            f"events on {found.host} can be read from other machines: use 127.0.0.1 or ipc://, or"
            " add --insecure if intended"
        )
    return EventsConfig(
        endpoint=ends[0],
        replay_endpoint=ends[1],
        node=settings.node_name or platform.node(),
        beyond_loopback=found is not None and not found.is_loopback,
        whole_hashes=settings.event_hashes == "bytes",
    )
