"""`Peering` without a process, a socket or a thread: the same parts, and how it hands commands to
them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np

from kvstore.engine.events import PeerCommand, PeerEvent
from kvstore.peers.fetcher import KINDS as FETCH_KINDS, Fetcher
from kvstore.peers.member import Peering
from kvstore.peers.peer_session import BlockServer, PeerContext
from kvstore.peers.pushes import KINDS, SLOW_S, PushCarrier, Stages
from kvstore.ports import Clock
from kvstore.types import Incarnation
from kvstore.wire.peers import PeerHello


class PeerParts:
    """`transfer_worker`: in place of the real one, which moves bytes of `memory`."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        post: Callable[[PeerEvent], None],
        *,
        transfer_worker: Any,
        memory: bytearray | memoryview,
        clock: Clock,
        draw_epoch: Callable[[], int],
        jitter: Callable[[], float],
        **options: Any,
    ) -> None:
        """`options`: of the context."""
        context = PeerContext(
            post,
            PeerHello(name, Incarnation(incarnation)),
            transfer_worker,
            np.frombuffer(memory, np.uint8),
            clock,
            None,
            Stages((*FETCH_KINDS, *KINDS), clock, slow_s=SLOW_S),
            **options,
        )
        self.carry_out: Callable[[PeerCommand], None] = partial(
            Peering._handle, cast("Peering", self)
        )
        self.context, self.fetcher = context, Fetcher(context, jitter=jitter)
        self.block_server = BlockServer(context, self.fetcher.address_of)
        its = context, self.fetcher, self.block_server.sessions
        self.carrier = PushCarrier(*its, draw_epoch=draw_epoch)
