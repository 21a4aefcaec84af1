"""The configuration of `kvstore index`: from its settings to a checked IndexConfig."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore.config.addresses import http_config
from kvstore.config.cluster import IndexConfig, is_installed, resolve_replica, resolve_tls
from kvstore.config.reading import load_settings
from kvstore.config.settings import IndexSettings
from kvstore.errors import ConfigError
from kvstore.stores.address import StoreConfig, store_config


def load_index_config(path: Path | None, flags: Mapping[str, Any]) -> IndexConfig:
    """The checked configuration. Raises ConfigError: one sentence, and how to mend it."""
    settings = load_settings(path, flags, IndexSettings)
    tls = resolve_tls(settings, what="an index")
    if tls is not None and settings.insecure:
        raise ConfigError("--insecure goes without certificates: leave out one or the other")
    if tls is not None and not tls.name_as("index"):
        raise ConfigError(
            f"--cert {settings.cert} names no index: make one with 'kvstore certs DIR --index NAME'"
        )
    replica = resolve_replica(settings.listen, settings.entries, option="--listen")
    return IndexConfig(
        replica=dataclasses.replace(replica, is_plain=settings.plain, store=_store(settings)),
        tls=tls,
        http=http_config(settings.metrics, beyond_loopback=settings.metrics_beyond_loopback),
        log_level=settings.log_level,
    )


def _store(settings: IndexSettings) -> StoreConfig | None:
    if settings.store is None:
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
            f"--store {config.place} is on another machine and unencrypted: use rediss://, or"
            " --insecure in a lab"
        )
    return config
