"""The configuration of `kvstore index`: from flags and YAML to what is checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvstore.config.addresses import http_config
from kvstore.config.cluster import (
    IndexConfig,
    TlsSettings,
    is_installed,
    resolve_replica,
    resolve_tls,
)
from kvstore.config.defaults import DEFAULT_INDEX_METRICS, DEFAULT_LISTEN, LOG_LEVELS
from kvstore.config.node import convert_settings
from kvstore.errors import ConfigError
from kvstore.stores.address import StoreConfig, store_config


class IndexSettings(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab", kw_only=True
):
    """The settings as an operator writes them, in YAML with the names of the flags."""

    listen: str = DEFAULT_LISTEN
    entries: str | int | None = None
    store: str | None = None
    store_password_file: str | None = None
    store_ca: str | None = None
    metrics: str | int | bool = DEFAULT_INDEX_METRICS
    metrics_beyond_loopback: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    plain: bool = False
    insecure: bool = False
    log_level: str = "info"


def load_index_config(path: Path | None, flags: Mapping[str, Any]) -> IndexConfig:
    """What these settings mean. Raises ConfigError: one sentence, and how to mend it."""
    settings = convert_settings(path, flags, IndexSettings)
    files = TlsSettings(
        ca=settings.ca, cert=settings.cert, key=settings.key, insecure=settings.insecure
    )
    tls = resolve_tls(files, what="an index")
    if tls is not None and settings.insecure:
        raise ConfigError("--insecure goes without certificates: leave out one or the other")
    if tls is not None and not tls.name_as("index"):
        raise ConfigError(
            f"--cert {settings.cert} names no index: make one with 'kvstore certs DIR --index NAME'"
        )
    replica = resolve_replica(settings.listen, settings.entries, option="--listen")
    level = settings.log_level.lower()
    if level not in LOG_LEVELS:
        raise ConfigError(f"log-level {level!r} is unknown: use one of {', '.join(LOG_LEVELS)}")
    return IndexConfig(
        replica=dataclasses.replace(replica, is_plain=settings.plain, store=_store(settings)),
        tls=tls,
        http=http_config(settings.metrics, beyond_loopback=settings.metrics_beyond_loopback),
        log_level=level,
    )


def _store(settings: IndexSettings) -> StoreConfig | None:
    if settings.store is None:
        if settings.store_password_file is not None or settings.store_ca is not None:
            raise ConfigError(
                "store-password-file and store-ca are about --store: add that, or leave them out"
            )
        return None
    if not is_installed("redis"):
        raise ConfigError(
            "--store needs redis, not installed here: pip install 'kvstore-llm[redis]'"
        )
    config = store_config(
        settings.store, password_file=settings.store_password_file, ca=settings.store_ca
    )
    if not config.is_here and not settings.insecure:
        raise ConfigError(
            f"--store {config.place} is beyond this machine, and everybody on the way can read and"
            " write it: use rediss://, or --insecure in a lab"
        )
    return config
