"""KV events as an engine publishes them, by hand: for tests of who reads them.

    with EnginePublisher(f"ipc://{directory}/kv") as engine:
        engine.publish(stored(tokens, 0, 2))

Numbers, replay and events are vLLM's, whose own publisher is compared with in an engine test. What
is lost, kept, or not what it should be is the test's choice. Does not cover: an engine.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final, Self

import msgspec
import zmq

from kvstore.index.chain import block_keys
from kvstore.wire.kv_events import END, SEQUENCE_BYTES

BLOCK_TOKENS: Final = 4
SEED: Final = "vllm-none-hash"
POLL_MS: Final = 20
CLEARED: Final[dict[str, Any]] = {"type": "AllBlocksCleared"}


class EnginePublisher:
    """Listens from construction until `close`."""

    def __init__(self, endpoint: str, *, kept_max: int = 10_000, replays: bool = True) -> None:
        """The replay is at ENDPOINT.replay."""
        self.endpoint, self.replay_endpoint = endpoint, f"{endpoint}.replay" if replays else ""
        self.asked: list[int] = []
        """First numbers of the replays that were asked for."""
        self.number = 0
        """Of the next batch."""
        self._kept: list[tuple[bytes, bytes]] = []
        self._kept_max = kept_max
        self._context = zmq.Context()
        self.live = self._context.socket(zmq.XPUB)
        """To be told of subscriptions, and to send what an engine would not."""
        self.live.bind(endpoint)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._replay, daemon=True)
        if replays:
            self._thread.start()

    def await_subscriber(self, *, timeout_s: float) -> bool:
        """Whether somebody subscribes in time."""
        return bool(self.live.poll(int(timeout_s * 1000))) and self.live.recv() == b"\x01"

    def publish(self, *events: dict[str, Any], is_lost: bool = False) -> None:
        """One batch; `is_lost`: only a replay has it."""
        self.publish_payload(msgspec.msgpack.encode([1.5, events, 0]), is_lost=is_lost)

    def publish_payload(self, payload: bytes, *, is_lost: bool = False) -> None:
        """Anything."""
        number = self.number.to_bytes(SEQUENCE_BYTES, "big")
        self._kept = [*self._kept, (number, payload)][-self._kept_max :]
        self.number += 1
        if not is_lost:
            self.live.send_multipart((b"", number, payload))

    def close(self) -> None:
        """Stop listening."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._context.destroy(linger=0)

    def _replay(self) -> None:
        with self._context.socket(zmq.ROUTER) as router:
            router.bind(self.replay_endpoint)
            while not self._closing.is_set():
                if not router.poll(POLL_MS):
                    continue
                client, _, first = router.recv_multipart()
                self.asked.append(int.from_bytes(first, "big"))
                for number, payload in self._kept:
                    if number >= first:
                        router.send_multipart((client, b"", b"", number, payload))
                router.send_multipart((client, b"", b"", END, b""))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stored(
    tokens: Sequence[int], begin: int, end: int, *, whole: bool = False, **more: Any
) -> dict[str, Any]:
    """Blocks of one prompt, as vLLM says that they are cached."""
    names = _names(tokens, whole=whole)
    return {
        "type": "BlockStored",
        "block_hashes": names[begin:end],
        "parent_block_hash": names[begin - 1] if begin else None,
        "token_ids": list(tokens[begin * BLOCK_TOKENS : end * BLOCK_TOKENS]),
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * (end - begin),
        "group_idx": 0,
    } | more


def removed(
    tokens: Sequence[int], *blocks: int, whole: bool = False, **more: Any
) -> dict[str, Any]:
    """Blocks of one prompt, as vLLM says that they are not any more."""
    names = _names(tokens, whole=whole)
    hashes = [names[block] for block in blocks]
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0} | more


def _names(tokens: Sequence[int], *, whole: bool) -> list[Any]:
    keys = block_keys(tokens, block_tokens=BLOCK_TOKENS, seed=SEED)
    return [key if whole else int.from_bytes(key[-8:], "big") for key in keys]
