"""Machines of a small network, in network namespaces of this one: what a cable can do to nodes.

    with Lan("a", "b") as lan:
        with lan.inside("a"):
            node = NodeProcess.start(…)    # lives at lan.address("a"), and everything it starts
        lan.cut("b")                       # nothing that is sent arrives, and nobody is told
        lan.heal("b")

A switch has a port for each; a cut takes the port from the switch, so both ends believe that they
are connected. Needs root and the `ip` program (Debian: iproute2). Gone when the context ends.
For tests and benchmarks.
"""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self

from kvstore.testing.process import on_lasting_thread
from tests.kit.nursery import OWN_NETWORK, enter_network
from tests.kit.programs import need

_NAMED: Final = Path("/run/netns")


class LanError(Exception):
    """This machine does not allow it; carries its words."""


class Lan:
    """Machines by name, each with one address, all on one switch."""

    def __init__(self, *names: str) -> None:
        self._prefix = f"kv{secrets.token_hex(3)}"
        self._names = names
        self._made: list[str] = []

    def address(self, name: str) -> str:
        """Of a machine, for the others."""
        return f"10.77.0.{self._names.index(name) + 1}"

    def cut(self, name: str) -> None:
        """Nothing to or from it arrives any more."""
        self._ip("-n", self._space("switch"), "link", "set", _port(name), "nomaster")

    def heal(self, name: str) -> None:
        """It is reached again."""
        self._ip("-n", self._space("switch"), "link", "set", _port(name), "master", "switch")

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """This thread, and what it starts, is on that machine."""
        with OWN_NETWORK.open("rb") as own, (_NAMED / self._space(name)).open("rb") as its:
            self._move(its.fileno())
            try:
                yield
            finally:
                self._move(own.fileno())

    def _move(self, space: int) -> None:
        """This thread, and the one that starts processes for it."""
        enter_network(space)
        on_lasting_thread(lambda: enter_network(space))

    def __enter__(self) -> Self:
        """Raises LanError."""
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self) -> None:
        switch = self._add("switch")
        self._ip("-n", switch, "link", "add", "switch", "type", "bridge")
        self._ip("-n", switch, "link", "set", "switch", "up")
        for name in self._names:
            space = self._add(name)
            ends = ("type", "veth", "peer", "name", "eth0", "netns", space)
            self._ip("-n", switch, "link", "add", "name", _port(name), *ends)
            self._ip("-n", switch, "link", "set", _port(name), "master", "switch", "up")
            self._ip("-n", space, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                self._ip("-n", space, "link", "set", device, "up")

    def _add(self, name: str) -> str:
        space = self._space(name)
        self._ip("netns", "add", space)
        self._made.append(space)
        return space

    def close(self) -> None:
        """Everything is gone."""
        while self._made:
            with suppress(LanError):
                self._ip("netns", "delete", self._made.pop())

    def _space(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _ip(self, *words: str) -> None:
        need("ip")
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise LanError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _port(name: str) -> str:
    """Of the switch."""
    return f"to-{name}"
