"""Other nodes for a node under test: keeps questions and fetches until a test answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from kvstore.engine.events import (
    AnswerPeer,
    Candidate,
    Fetch,
    Fetched,
    Locate,
    Located,
    PeerAsked,
)
from kvstore.wire.peers import GiveBack, GivenBack, ServeAnswer, ServeAsk
from tests.unit.engine.disk import SPACE, DiskNode
from tests.unit.engine.harness import checksum, keys, number_of


def serve(peer: int, serving: int, *numbers: int, tenant: str = "t") -> PeerAsked[ServeAsk]:
    """Another node asks for these blocks."""
    return PeerAsked(peer, f"n{peer}", ServeAsk(serving, tenant, SPACE, keys(*numbers)))


class PeerNode(DiskNode):
    """A node that may fetch; nobody answers by himself."""

    kept: ClassVar[dict[type[Any], str]] = DiskNode.kept | {
        Locate: "locates",
        Fetch: "fetches",
        AnswerPeer: "answers",
    }
    locates: list[Locate]
    fetches: list[Fetch]
    answers: list[AnswerPeer]

    def __init__(self, *, slots: int = 32, **config: Any) -> None:
        super().__init__(slots=slots, fetches=True, **config)

    @property
    def served(self) -> list[ServeAnswer]:
        """All answers to those who asked for blocks."""
        return [each.its for each in self.answers if isinstance(each.its, ServeAnswer)]

    @property
    def given_back(self) -> list[GivenBack]:
        """All answers to those who have read blocks."""
        return [each.its for each in self.answers if isinstance(each.its, GivenBack)]

    def locate(self, *candidates: tuple[str, int], is_known: bool = True) -> None:
        """The oldest question is answered: (node, blocks in its dram)."""
        found = tuple(Candidate(node, blocks) for node, blocks in candidates)
        self.step(Located(self.locates.pop(0).locate, found, is_known))

    def arrive(self, good: Sequence[bool] | None = None, *, peer_failed: bool = False) -> None:
        """The oldest fetch ends; without `good` all is well."""
        fetch = self.fetches.pop(0)
        count = len(fetch.keys) // 32
        flags = list(good) if good is not None else [True] * count
        numbers = [number_of(fetch.keys[at : at + 32]) for at in range(0, count * 32, 32)]
        sums = b"".join(
            checksum(number, rank) for number in numbers for rank in range(len(fetch.targets))
        )
        self.step(Fetched(fetch.job, bytes(flags), sums if any(flags) else b"", peer_failed))

    def serve(self, serving: int, *numbers: int, peer: int = 1, tenant: str = "t") -> ServeAnswer:
        """Another node asks for blocks that are in dram."""
        self.step(serve(peer, serving, *numbers, tenant=tenant))
        return self.served[-1]

    def give_back(self, serving: int, peer: int = 1) -> list[bool]:
        """Another node has read them. Returns which stayed."""
        self.step(PeerAsked(peer, f"n{peer}", GiveBack(serving)))
        return [bool(flag) for flag in self.given_back[-1].intact]
