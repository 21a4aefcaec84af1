"""The faults that the world must know, by what a machine room calls them, and what it calls them.

Does not cover: what needs real processes or a real kernel (`tests/faults`), or a router, which the
world does not have yet.
"""

from __future__ import annotations

CATALOGUE: dict[str, tuple[str, ...]] = {
    "kill -9 of a node, an engine, one process of it": (
        "node killed",
        "engine killed",
        "rank killed",
    ),
    "SIGSTOP and SIGCONT": ("node stopped", "engine stopped"),
    "restart at the same address as a new incarnation": (
        "node killed",
        "node upgraded",
        "node restarts in a step",
    ),
    "kill -9 of the node process only, between any two stores; its memory is kept": ("warm kill",),
    "upgrade of the node process, its memory is kept": ("warm upgrade",),
    "restart with an empty directory": ("directory emptied",),
    "restart with another node's directory": ("directory swapped",),
    "restart with an older layout": ("older layout",),
    "sockets that end": ("scheduler hangs up", "rank hangs up"),
    "ENOSPC": ("disk full",),
    "EIO of read, write, fsync": ("read error", "write error", "sync error"),
    "EMFILE": ("no descriptors",),
    "torn write": ("torn write",),
    "lost unsynced data": ("power cut", "lost unsynced"),
    "bit flip on disk": ("disk bit flipped",),
    "misdirected read": ("misdirected read",),
    "slow disk": ("disk slow",),
    "hung disk": ("disk hangs",),
    "bit flip in dram": ("byte flipped",),
    "hostile shared memory": ("arena scribbled",),
    "reader stopped in the middle of a copy": ("copy stalls", "engine stopped"),
    "monotonic pause": ("machine suspended",),
    "drift": ("clock drifts",),
    "transfer: never completes": ("copy never ends", "read never ends"),
    "transfer: error after a partial write": ("copy fails half way", "read stops half way"),
    "transfer: late write after abort": ("late write",),
    "transfer: other bytes than were sent": ("read brings wrong bytes",),
    "kill -9 of the transfer child": ("transfer worker dies",),
    "network: cut both ways, and healed": ("partition",),
    "network: cut one way": ("partition one way",),
    "network: reset": ("connection lost",),
    "network: duplicate": ("feed says it twice",),
    "network: delay, words of streams that are over": ("index lags",),
    "kill -9 of the index, which has forgotten everything": ("index restarts",),
    "SIGSTOP of the index": ("index stopped",),
    "an index that is slow": ("index slow",),
    "a node that lies to the index": ("node lies",),
    "another node at the same address": ("addresses swapped",),
    "transfer: one of several handles fails": ("one of several copies fails",),
    "abort at any time": ("abort",),
    "slow reader": ("slow",),
    "the engine changes its mind": ("preempt", "reset", "clear"),
}
"""The catalogue's name → the world's: each of them is counted. A full pool needs no fault: most
arenas of the world are too small for what happens in them."""
