"""What a node knows of another process that says it is this node: one certificate on two machines.

A replica of the index hears one of them, refuses the other, and says so to both
(`kvstore.index.rivals`): every second to the one, each time that it dials to the other.
"""

from __future__ import annotations

import logging
from typing import Final

OWN_NAMES: Final = "Give each machine a certificate, or with --insecure a --node-name, of its own"
TOLD_S: Final = 10.0

_log = logging.getLogger(__name__)


class Twin:
    """By one replica."""

    def __init__(self) -> None:
        self.text = ""
        """Empty: none was told of lately."""
        self._at_s = 0.0

    def told(self, text: str, now_s: float) -> None:
        """Logged when it is news."""
        if not self.text:
            _log.error("%s. %s", text, OWN_NAMES)
        self.text, self._at_s = text, now_s

    def look(self, now_s: float) -> None:
        """While this node is heard: is the other one gone?"""
        if now_s - self._at_s > TOLD_S:
            self.text = ""
