"""One node process, as its supervisor sees it.

Does not cover: start and end of any child (`net.child`), messages to and from it (`supervisor`).
"""

from __future__ import annotations

import signal
import socket
import struct
import time
from functools import partial
from typing import Final

from kvstore.net.child import Child, Spawned, spawn
from kvstore.supervisor import control

spawn_process: Final = partial(spawn, ("-P", "-m", "kvstore.node.process"))


class Process(Child):
    """One node process."""

    def __init__(self, spawned: Spawned) -> None:
        super().__init__(spawned)
        # Blocking, with a limit of the kernel's: a timeout of Python's would make receiving wait.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 10, 0))
        self.began_ns = time.monotonic_ns()
        self.prepared: control.Prepared | None = None
        self.serving_since_ns = 0
        self.deadline_ns = 0
        """Limit for its answer, service or end; 0: none."""
        self.has_begun = self.was_killed = self.hangs_told = False
        self.asked_to_end = 0
        """The signal that was sent for it; 0: none."""
        self.disk_hangs = False
        """Whether the disk tier hangs, by the last report of the process."""

    @property
    def is_mute(self) -> bool:
        """Whether it had loaded its code, was killed, and had touched nothing until then."""
        return self.was_killed and self.prepared is not None and not self.has_begun

    def was_a_life(self, status: int) -> bool:
        """Whether the next process must differ from it in generations and numbers of connections.

        A process that never served has given out none; mute ones and refused starts may outnumber
        the numbers."""
        never_served = self.is_mute or status == control.EXIT_REFUSED
        return self.serving_since_ns != 0 or not never_served

    def kill(self) -> None:
        """Send SIGKILL, which ends the process at once unless it hangs in the kernel."""
        self.was_killed = True
        self.signal(signal.SIGKILL)
