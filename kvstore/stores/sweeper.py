"""Takes void slots out of the rows of a shared store, a piece at a time.

One replica sweeps for all: the one with the lease in the store. A pass looks at every row once; the
slots that were void when it began are gone at its end.
"""

from __future__ import annotations

from typing import Final

from kvstore.stores import scripts
from kvstore.stores.connection import StoreConnection

ROWS_AT_ONCE: Final = 1000
PIECES_AT_ONCE: Final = 4
SLOTS_AT_ONCE: Final = 1024


class Sweeper:
    """The sweeper of one replica."""

    def __init__(self, connection: StoreConnection, me: bytes) -> None:
        self.void_count = 0
        """Slots to be swept, as of the last poll."""
        self._connection = connection
        self._me = me
        self._void = b""
        self._cursor = 0

    def restart(self) -> None:
        """Forget void slots: they are of another state."""
        self._void, self._cursor = b"", 0

    async def sweep(self, epoch: bytes) -> None:
        """Some pieces of a pass, if a slot is void. Raises FAILURES."""
        for _ in range(PIECES_AT_ONCE):
            if not self._void:
                if not self.void_count:
                    return
                self._void = b"".join(await self._connection.void_slots(SLOTS_AT_ONCE))
                self._cursor = 0
                if not self._void:
                    return
            cursor, names = await self._connection.rows(self._cursor, ROWS_AT_ONCE)
            last = b"" if cursor else b"last"
            call = (epoch, self._me, self._void, last, *names)
            (reply,) = await self._connection.write_all(scripts.SWEEP, [call])
            self._cursor = cursor
            if reply < 0 or not cursor:
                self._void = b""
                return
