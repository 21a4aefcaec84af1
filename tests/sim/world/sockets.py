"""The sockets between the world's engines and its node.

Does not cover: who reads how much of them, and when (`world`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container

from kvstore.wire.messages import HelloRank, HelloScheduler, Message, decode_from_node, encode
from tests.sim.world.parts import SimMemory


class SimSocket:
    """One connection; both directions keep their order."""

    def __init__(self, owner: str, rank: int | None, memory: SimMemory) -> None:
        self.owner = owner
        self.rank = rank
        """None: the scheduler's."""
        self.memory = memory
        self.to_node: deque[bytes] = deque()
        self.to_engine: deque[bytes | None] = deque()
        self.node_sees_end = False

    def cut(self, kept: int) -> None:
        """The process is gone; so many datagrams of its last ones were sent."""
        while len(self.to_node) > kept:
            self.to_node.pop()
        self.node_sees_end = True


class SimSockets(dict[int, SimSocket]):
    """By connection number, which begins at 1. Unknown numbers are of sockets that are gone."""

    _next = 1

    def connect(self, hello: HelloScheduler | HelloRank, memory: SimMemory) -> int:
        """A new one; its arena is `memory`."""
        rank = hello.rank if isinstance(hello, HelloRank) else None
        socket = SimSocket(hello.engine_id, rank, memory)
        socket.to_node.append(encode(hello))
        number, self._next = self._next, self._next + 1
        self[number] = socket
        return number

    def send(self, connection: int, message: Message) -> None:
        """Of an engine, to the node."""
        if connection in self:
            self[connection].to_node.append(encode(message))

    def hang_up(self, connection: int) -> None:
        """The engine closes; the node learns of it after what is still queued."""
        if connection in self:
            self[connection].node_sees_end = True
            self[connection].to_engine.clear()

    def take(self, connection: int, count: int | None = None) -> list[Message | None]:
        """What has arrived at an engine, oldest first; None last when the connection has ended."""
        if connection not in self:
            return [None]
        waiting = self[connection].to_engine
        taken: list[Message | None] = []
        while waiting and (count is None or len(taken) < count):
            datagram = waiting.popleft()
            taken.append(None if datagram is None else decode_from_node(datagram))
        return taken

    def to_engine(self, connection: int, message: Message) -> None:
        """Of the node, to an engine."""
        if connection in self:
            self[connection].to_engine.append(encode(message))

    def end(self, connection: int) -> bool:
        """The node closes. False: there is no such connection."""
        if connection in self:
            self[connection].to_engine.append(None)
        return connection in self

    def node_died(self, held: Container[int]) -> None:
        """Every socket ends; those that an engine still holds learn of it."""
        for connection in [c for c in self if c not in held]:
            del self[connection]
        for socket in self.values():
            socket.to_engine.append(None)
            socket.to_node.clear()
            socket.node_sees_end = False
