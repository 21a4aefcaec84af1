"""From the command line to the supervisor: settings passed on, and the exec of this process."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import msgspec

from kvstore.config.node import NodeConfig
from kvstore.errors import ConfigError
from kvstore.supervisor.supervisor import Start


def start_of(config: NodeConfig, settings: dict[str, Any]) -> Start:
    """Input of a supervisor."""
    peers = config.cluster.peers if config.cluster else None
    return Start(
        settings=settings,
        socket=str(config.socket),
        others_may_connect=bool(config.allow_uids - {0, os.geteuid()}),
        dram_bytes=config.dram_bytes,
        dram_note=config.dram_note,
        log_level=config.log_level,
        drain_s=peers.drain_s if peers else 0,
    )


def supervise(config: NodeConfig, settings: dict[str, Any]) -> NoReturn:
    """Become the supervisor of a node: a process with few of the modules loaded here."""
    fd = os.memfd_create("kvstore-start", 0)
    os.write(fd, msgspec.json.encode(start_of(config, settings)))
    os.lseek(fd, 0, os.SEEK_SET)
    # The command line follows, for readers of a process list.
    command = ["-P", "-m", "kvstore.supervisor.supervisor", str(fd), *sys.argv[1:]]
    sys.stdout.flush()
    try:
        os.execv(sys.executable, [sys.executable, *command])  # noqa: S606
    except OSError as error:
        raise ConfigError(f"{sys.executable} cannot be run: {error.strerror}") from None
