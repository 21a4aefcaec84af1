"""An outside indexer, as small as can be: it follows the KV events of one node.

    with Indexer(endpoint, replay_endpoint) as indexer:
        indexer.catch_up()
        indexer.listen(timeout_s=1.0)
        assert key in indexer.keys("CPU")

For tests of a real node, and the pattern for an indexer: subscribe first, then catch up; on a gap
catch up again. Blocking, one thread. Events are not verified: not for a hostile node.
"""

from __future__ import annotations

from typing import Any, Final, Self

import msgspec
import zmq

from kvstore.types import KEY_BYTES
from kvstore.wire.kv_events import END, SEQUENCE_BYTES

REPLY_TIMEOUT_S: Final = 10.0


class Indexer:
    """Blocks of one node, by its own events."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self.held: set[tuple[str, str, bytes, tuple[int, ...], bytes]] = set()
        """(medium, tenant, space, shard, key)."""
        self.hashes: dict[str, set[int | bytes]] = {}
        """State of an indexer that reads vLLM's fields only, by medium."""
        self.next_number = 0
        self.gaps = 0
        self.snapshots = 0
        self.incarnation = ""
        self.topics: set[str] = set()
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self._live.connect(endpoint)
        self.replay = self._context.socket(zmq.DEALER)
        """The replay socket itself, in use while the indexer catches up."""
        self.replay.connect(replay_endpoint)

    def keys(self, medium: str) -> set[bytes]:
        """Keys with a shard in a tier."""
        return {key for its_medium, *_, key in self.held if its_medium == medium}

    def listen(self, *, timeout_s: float) -> bool:
        """Take one live batch, filling the gap before it. False: none in time."""
        if not self._live.poll(int(timeout_s * 1000)):
            return False
        topic, sequence, payload = self._live.recv_multipart()
        self.topics.add(topic.decode())
        number = int.from_bytes(sequence, "big")
        if self._is_foreign(payload):
            self.next_number = 0
        if number > self.next_number:
            self.gaps += 1
            self.catch_up()
        if number == self.next_number:  # it may have been in the replay
            self._apply(payload)
            self.next_number += 1
        return True

    def catch_up(self) -> None:
        """Request missing batches; a snapshot, when some are kept no more.

        Raises TimeoutError.
        """
        for number, payload in self._ask(self.next_number.to_bytes(SEQUENCE_BYTES, "big")):
            if number != self.next_number or self._is_foreign(payload):
                break
            self._apply(payload)
            self.next_number += 1
        else:
            return
        self.snapshots += 1
        for number, payload in self._ask(END):
            self._apply(payload)
            self.next_number = number + 1

    def _ask(self, request: bytes) -> list[tuple[int, bytes]]:
        self.replay.send_multipart([b"", request])
        replies: list[tuple[int, bytes]] = []
        while True:
            if not self.replay.poll(int(REPLY_TIMEOUT_S * 1000)):
                raise TimeoutError("the node did not answer a replay request in time")
            _, sequence, payload = self.replay.recv_multipart()
            if sequence == END:
                return replies
            replies.append((int.from_bytes(sequence, "big"), payload))

    def _is_foreign(self, payload: bytes) -> bool:
        """Whether the node was started anew and this is not its first batch."""
        first = msgspec.msgpack.decode(payload)[1][0]
        is_start = first["type"] == "AllBlocksCleared"
        return not is_start and first["kvstore"]["incarnation"] != self.incarnation

    def _apply(self, payload: bytes) -> None:
        _, events, _ = msgspec.msgpack.decode(payload)
        for event in events:
            about = event["kvstore"]
            if event["type"] == "AllBlocksCleared":
                self.held.clear()
                self.hashes.clear()
                self.incarnation = about["incarnation"]
            else:
                self._change(event, about)

    def _change(self, event: dict[str, Any], about: dict[str, Any]) -> None:
        medium, shard = event["medium"], tuple(about["shard"].values())
        scope = medium, about["tenant"], about["space"], shard
        keys = about["keys"]
        blocks = {(*scope, keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)}
        hashes = self.hashes.setdefault(medium, set())
        if event["type"] == "BlockStored":
            self.held |= blocks
            hashes.update(event["block_hashes"])
        else:
            self.held -= blocks
            hashes.difference_update(event["block_hashes"])

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
