"""Seeded prompts: conversations that grow, and prompts that share nothing.

Covers: text, token ids and their order. Pure: tokenizer and answers come from the caller, nothing
is read or timed. Does not cover: requests (`kvstore.demo.engine`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

Encode = Callable[[str], list[int]]
"""Function from a text to token ids, without added special tokens."""
_WORDS: Final = """
answer arm autumn bridge cloud deep dinner evening far field flower garden green harbour hat heart
hill honey idea island journey kitchen knife lamp large letter long market morning mountain music
narrow new night ocean old paper pencil people picture pocket quiet rain reason river road school
season ship silver simple six song station stone story summer teacher town tree valley voice walk
water week wheel window winter work year young
"""
WORDS: Final = tuple(_WORDS.split())


class ConversationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Size and seed of a multi-round question answering workload; by default that of the demo."""

    seed: int = 20261121
    users: int = 5
    rounds: int = 4
    system_words: int = 70
    """Words of the system prompt, which all users share."""
    document_words: int = 260
    """Words of a user's document in the first question; different for each user."""
    question_words: int = 30
    answer_tokens: int = 16


class Turn(msgspec.Struct, frozen=True):
    """One request of the replay."""

    user: int
    round: int
    prompt: tuple[int, ...]
    """The conversation so far and the new question, as token ids."""


class Conversations:
    """The running state of a replay: questions and answers of each user.

    Turns come round by round, the users of a round in a seeded order, so between two turns of one
    user come turns of all others: an engine whose cache is smaller than all histories has evicted.

        for turns in conversations.rounds():
            for turn in turns:
                conversations.answer(turn, model(turn.prompt))
    """

    def __init__(self, plan: ConversationPlan, encode: Encode) -> None:
        self.plan = plan
        rng = random.Random(plan.seed)
        system = f"<|system|>Answer briefly. {prose(rng, plan.system_words)}<|end|>"
        self._history = [encode(system) for _ in range(plan.users)]
        self._questions = [
            [encode(self._question(rng, round)) for round in range(plan.rounds)]
            for _ in range(plan.users)
        ]
        self._order = [rng.sample(range(plan.users), plan.users) for _ in range(plan.rounds)]

    def _question(self, rng: random.Random, round: int) -> str:
        document = prose(rng, self.plan.document_words) + " " if round == 0 else ""
        return f"<|user|>{document}{prose(rng, self.plan.question_words)}<|end|><|assistant|>"

    def rounds(self) -> Iterator[list[Turn]]:
        """Yield the turns of one round at a time; those of the round before have answers."""
        for round, users in enumerate(self._order):
            for user in users:
                self._history[user] += self._questions[user][round]
            yield [Turn(user, round, tuple(self._history[user])) for user in users]

    def answer(self, turn: Turn, tokens: Sequence[int]) -> None:
        """Add the model's answer to the history of the turn's user."""
        self._history[turn.user] += tokens


def prose(rng: random.Random, words: int) -> str:
    """Text of `words` words."""
    return " ".join(rng.choice(WORDS) for _ in range(words))


def text_tokens(rng: random.Random, encode: Encode, count: int) -> tuple[int, ...]:
    """Exactly `count` tokens of prose."""
    ids: list[int] = []
    while len(ids) < count:
        ids += encode(prose(rng, count - len(ids)) + " ")
    return tuple(ids[:count])


def fresh_prompts(
    seed: int, *, count: int, tokens: int, encode: Encode
) -> tuple[tuple[int, ...], ...]:
    """`count` prompts of exactly `tokens` tokens whose first blocks already differ."""
    rng = random.Random(seed)
    marks = rng.sample(range(10**8), count)
    return tuple(
        (*encode(f"{mark:08} "), *text_tokens(rng, encode, tokens))[:tokens] for mark in marks
    )
