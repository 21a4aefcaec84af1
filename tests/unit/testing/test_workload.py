"""The seeded workload: reproducible, growing by what was answered, and rich in hard lengths."""

from __future__ import annotations

import itertools
from itertools import chain

from kvstore.demo.workload import (
    ConversationPlan,
    Conversations,
    Turn,
    fresh_prompts,
)
from tests.kit.prompts import varied_prompts

BLOCK = 128
PLAN = ConversationPlan(
    seed=7,
    users=4,
    rounds=3,
    system_words=40,
    document_words=60,
    question_words=12,
    answer_tokens=5,
)


def encode(text: str) -> list[int]:
    return list(text.encode())


def replay(plan: ConversationPlan) -> list[Turn]:
    conversations = Conversations(plan, encode)
    turns = []
    for turn in chain.from_iterable(conversations.rounds()):
        turns.append(turn)
        conversations.answer(turn, [turn.user, turn.round, 255])
    return turns


def common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def test_the_seed_alone_decides() -> None:
    assert replay(PLAN) == replay(PLAN)
    other = ConversationPlan(**{f: getattr(PLAN, f) for f in PLAN.__struct_fields__} | {"seed": 8})
    assert replay(PLAN) != replay(other)


def test_history_grows_by_answer_and_question() -> None:
    turns = {(t.user, t.round): t.prompt for t in replay(PLAN)}
    assert len(turns) == PLAN.users * PLAN.rounds
    for user in range(PLAN.users):
        for number in range(1, PLAN.rounds):
            before = (*turns[user, number - 1], user, number - 1, 255)
            now = turns[user, number]
            assert now[: len(before)] == before
            assert bytes(now[len(before) :]).startswith(b"<|user|>")


def test_all_users_share_the_system_prompt_and_nothing_else() -> None:
    first = [t.prompt for t in replay(PLAN) if t.round == 0]
    shared = common_prefix(first[0], first[1])
    assert bytes(first[0][:shared]).startswith(b"<|system|>")
    assert b"<|end|><|user|>" in bytes(first[0][:shared])
    for a, b in itertools.pairwise(first):
        assert common_prefix(a, b) < shared + 40


def test_fresh_prompts_share_no_block() -> None:
    prompts = fresh_prompts(3, count=50, tokens=3 * BLOCK + 5, encode=encode)
    assert {len(p) for p in prompts} == {3 * BLOCK + 5}
    assert len({p[:BLOCK] for p in prompts}) == 50


def test_varied_prompts_hold_every_hard_case() -> None:
    prompts = varied_prompts(5, count=120, block_tokens=BLOCK, blocks_max=6, encode=encode)
    assert prompts == varied_prompts(5, count=120, block_tokens=BLOCK, blocks_max=6, encode=encode)
    assert len(prompts) == 120
    lengths = [len(p) for p in prompts]
    assert max(lengths) <= 6 * BLOCK
    assert min(lengths) >= 1
    for remainder in (0, 1, BLOCK - 1):
        assert sum(length % BLOCK == remainder for length in lengths) >= 5, remainder
    assert sum(length < BLOCK for length in lengths) >= 5
    assert len(set(prompts)) < 120, "no equal prompts"
    extends = shares = changed = 0
    for i, late in enumerate(prompts):
        common = [common_prefix(late, early) for early in prompts[:i] if early != late]
        extends += any(BLOCK <= c == len(e) for c, e in zip(common, prompts[:i], strict=False))
        shares += any(c >= BLOCK and c < len(late) for c in common)
        changed += any(
            len(late) == len(early) and sum(x != y for x, y in zip(late, early, strict=True)) == 1
            for early in prompts[:i]
        )
    assert shares >= 20
    assert changed >= 5
    assert extends >= 1
