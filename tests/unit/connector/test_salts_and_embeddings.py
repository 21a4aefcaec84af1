"""Cache salts and prompt embeddings: vLLM's own keys hold them, so such requests are served."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.connector.prompts import why_left_out
from kvstore.index.chain import block_keys
from tests.unit.connector.real_requests import real_request
from tests.unit.connector.test_scheduler_side import BLOCK_TOKENS

pytestmark = pytest.mark.engine

TOKENS = list(range(3 * BLOCK_TOKENS))


def keys(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[bytes]:
    """Of a request of three blocks, which is not left out."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    made = real_request("r", None if "prompt_embeds" in settings else TOKENS, **settings)
    assert why_left_out(made, "hashed") == ""
    return list(made.block_hashes)


def test_a_salt_is_in_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [keys(monkeypatch, cache_salt=salt) for salt in (None, "a", "b")]
    assert len({key for its in found for key in its}) == 9
    expected = [
        block_keys(TOKENS, block_tokens=BLOCK_TOKENS, seed="0", cache_salt=salt)
        for salt in ("", "a", "b")
    ]
    assert found == [list(its) for its in expected]


def test_embeddings_are_in_the_keys_from_the_block_on_that_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    same, other = (torch.ones(len(TOKENS), 4) for _ in range(2))
    other[BLOCK_TOKENS + 1, 2] = 2
    found = [keys(monkeypatch, prompt_embeds=each) for each in (same, same.clone(), other)]
    assert found[0] == found[1]
    assert [one == another for one, another in zip(found[0], found[2], strict=True)] == [
        True,
        False,
        False,
    ]
    assert not set(found[0]) & set(keys(monkeypatch))
