"""A node's view of another process with the same name: one certificate on two machines.

A replica of the index accepts one of them, refuses the other, and reports the conflict to both
(`kvstore.index.feed`): every second to the one, at each attempt to the other.
"""

from __future__ import annotations

import logging
from typing import Final

OWN_NAMES: Final = "Give each machine a certificate, or with --insecure a --node-name, of its own"
TOLD_S: Final = 10.0

_log = logging.getLogger(__name__)


class Twin:
    """Second process with this node's name, as reported by one replica."""

    def __init__(self) -> None:
        self.text = ""
        """Text of the last report; empty: there was none lately."""
        self._at_s = 0.0

    def told(self, text: str, now_s: float) -> None:
        """Keep a report; the first one is logged."""
        if not self.text:
            _log.error("%s. %s", text, OWN_NAMES)
        self.text, self._at_s = text, now_s

    def look(self, now_s: float) -> None:
        """Drop a report that is older than TOLD_S: this node is accepted, and the other process is
        gone."""
        if now_s - self._at_s > TOLD_S:
            self.text = ""
