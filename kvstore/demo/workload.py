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

_DICTIONARY: Final = """
able about account across action after again air all along always among animal answer arm autumn
back bank basket beach bear before begin bell below better bird black blue boat body book bottle
branch bread bridge bright brother brown build busy butter button call calm candle carry castle
cause chair change cheese child circle city clean clear climb clock cloud coat cold colour
common cook copper corner count country cover cross dark daughter day deep desk distant doctor
door draw dream drink drive dry early earth east easy edge eight empty engine enough evening
every family farm father feather field find finger fire first fish five flat flower follow
forest forget four free fresh friend fruit full garden general gentle give glass gold grass
green ground group grow half hammer hand happy harbour hat head heart heavy hill history hold
honest honey horse hospital hour house hundred ice idea inside iron island journey keep kettle
key kind kitchen knee knife lake lamp language large last laugh leaf learn left letter level
light line listen little long lost low machine many map market measure meeting middle milk mind
minute mirror money month moon morning mountain mouth music narrow needle never new night nine
north nothing number ocean office old open orange order other paint paper parcel past path
pencil people picture place plain plant plate pocket point poor present price problem quick
quiet quite rain reach ready reason red rest rice river road roof room round sail salt same sand
school science sea second secret seven shadow sharp sheep ship short silver simple sister six
sleep slow small smooth snow soft song south spoon spring square star station stone story street
strong sudden summer sun table tall teacher ten thing thread three ticket tired together
tomorrow town train travel tree true under until useful valley village voice walk wall warm
watch water wave weather week west wheel white wide wind window winter wire wood word work world
write year yellow yesterday young
"""
WORDS: Final = tuple(_DICTIONARY.split())


class ConversationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Size and seed of a multi-round question answering workload."""

    seed: int
    users: int
    rounds: int
    system_words: int
    """Words of the system prompt, which all users share."""
    document_words: int
    """Words of a user's document in the first question; different for each user."""
    question_words: int
    answer_tokens: int

    def __post_init__(self) -> None:
        for field in ("users", "rounds", "system_words", "question_words", "answer_tokens"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, not {getattr(self, field)}")
        if self.document_words < 0:
            raise ValueError(f"document_words must not be negative, not {self.document_words}")


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
        self._open: list[Turn] = []

    def _question(self, rng: random.Random, round: int) -> str:
        document = prose(rng, self.plan.document_words) + " " if round == 0 else ""
        return f"<|user|>{document}{prose(rng, self.plan.question_words)}<|end|><|assistant|>"

    def rounds(self) -> Iterator[list[Turn]]:
        """Yield the turns of one round at a time. All turns of the previous round must have
        answers.
        """
        for round, users in enumerate(self._order):
            assert not self._open, "a previous turn was not answered"
            for user in users:
                self._history[user] += self._questions[user][round]
                self._open.append(Turn(user, round, tuple(self._history[user])))
            yield list(self._open)

    def answer(self, turn: Turn, tokens: Sequence[int]) -> None:
        """Add the model's answer to the history of the turn's user."""
        assert turn in self._open, "an answer to another turn"
        self._history[turn.user] += tokens
        self._open.remove(turn)


def prose(rng: random.Random, words: int) -> str:
    """Text of `words` words, in sentences of 5 to 12."""
    sentences: list[str] = []
    while words > 0:
        count = min(words, rng.randint(5, 12))
        sentence = " ".join(rng.choice(WORDS) for _ in range(count))
        sentences.append(sentence.capitalize() + ".")
        words -= count
    return " ".join(sentences)


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
