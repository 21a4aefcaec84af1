"""Prompts with images by name, cache salts or embeddings: real vllm requests, their identifiers
made by vllm's own hasher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvstore.connector.prompts import why_left_out
from kvstore.engine.why.reasons import reason_of
from kvstore.index.chain import block_keys
from kvstore.wire import messages as m
from tests.unit.connector.real_requests import real_request
from tests.unit.connector.test_scheduler_side import (
    BLOCK_TOKENS,
    FullSocket,
    MakeSide,
    clock,
    make_side,
    stories,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["clock", "make_side"]

CAT, DOG = (np.full((8, 8, 3), shade, np.uint8) for shade in (1, 2))


def identifier(image: Any, uuid: str | None, *, algorithm: Any = "blake3", **inputs: Any) -> str:
    """How vllm names an image."""
    from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems
    from vllm.multimodal.processing.inputs import ProcessorInputs

    items = MultiModalDataItems({"image": ImageProcessorItems([image])})
    made = ProcessorInputs([1], items, {"image": [uuid]}, **inputs)
    return str(made.get_mm_hashes("a/model", algorithm)["image"][0])


def request(number: int, *identifiers: str) -> Request:
    """A prompt of 8 blocks with these images, one in each block."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    features = [
        MultiModalFeatureSpec(
            None, "image", name, PlaceholderRange(offset=at * BLOCK_TOKENS, length=4), name
        )
        for at, name in enumerate(identifiers)
    ]
    return real_request(f"r{number}", [1] * 8 * BLOCK_TOKENS, mm_features=features)


def test_an_image_that_its_client_named_is_left_out(make_side: MakeSide) -> None:
    link = FullSocket(room=100)
    side = make_side(link)
    hashed, named = identifier(CAT, None), identifier(CAT, "mine")
    asked = [request(0), request(1, hashed), request(2, named), request(3, hashed, named)]
    for one in asked:
        side.on_new_request(one)
        side.get_num_new_matched_tokens(one, 0)
        side.request_finished(one)
    hinted = [message.keys for message in link.sent if isinstance(message, m.Hint)]
    assert hinted == [b"".join(one.block_hashes) for one in asked[:2]]
    told = [story for story in stories(link) if story[0] in {"r2", "r3"}]
    assert told == [("r2", "image uuid"), ("r3", "image uuid")]
    assert "uuid" in reason_of("image uuid").text


@pytest.mark.parametrize("algorithm", ["blake3", "sha256", "sha512"])
def test_a_hash_of_the_content_is_one(algorithm: str) -> None:
    names = [identifier(image, None, algorithm=algorithm) for image in (CAT, DOG)]
    assert names[0] != names[1]
    assert [why_left_out(request(0, name), "hashed") for name in names] == ["", ""]


@pytest.mark.parametrize(
    "uuid", ["x", "a" * 63, "A" * 64, "g" * 64, "a" * 64 + "\n", "renderer0-mm-1-image-0", "a" * 96]
)
def test_what_is_no_hash_by_its_form_is_none(uuid: str) -> None:
    assert identifier(CAT, uuid) == uuid
    assert why_left_out(request(0, uuid), "hashed") == "image uuid"


def test_a_uuid_that_looks_like_a_hash_is_not_told_apart_but_with_images_off_all_are_out() -> None:
    """SECURITY.md says so; a change of vllm's that mends it is to be noticed."""
    forged = identifier(DOG, identifier(CAT, None))
    processed = [
        identifier(image, "mine", hf_processor_mm_kwargs={"do_resize": False})
        for image in (CAT, DOG)
    ]
    assert forged == identifier(CAT, None)
    assert processed[0] == processed[1]
    for name in (forged, processed[0], "mine"):
        assert why_left_out(request(0, name), "none") == "images off"
    assert why_left_out(request(0, forged), "hashed") == ""
    assert why_left_out(request(0), "none") == ""


def test_a_session_that_gets_an_image_later_is_left_out_from_there_on(
    make_side: MakeSide,
) -> None:
    link = FullSocket(room=100)
    side = make_side(link)
    session = request(0)
    side.on_new_request(session)
    session.mm_features.extend(request(1, "mine").mm_features)
    assert side.get_num_new_matched_tokens(session, 0) == (0, False)
    assert not [message for message in link.sent if isinstance(message, m.LeaseAsk)]


# ── cache salts and prompt embeddings: vLLM's own keys hold them ─────────────────────────────────


TOKENS = list(range(3 * BLOCK_TOKENS))


def keys(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[bytes]:
    """Of a request of three blocks, which is not left out."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    made = real_request("r", None if "prompt_embeds" in settings else TOKENS, **settings)
    assert why_left_out(made, "hashed") == ""
    return list(made.block_hashes)


@pytest.mark.engine
def test_a_salt_is_in_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [keys(monkeypatch, cache_salt=salt) for salt in (None, "a", "b")]
    assert len({key for its in found for key in its}) == 9
    expected = [
        block_keys(TOKENS, block_tokens=BLOCK_TOKENS, seed="0", cache_salt=salt)
        for salt in ("", "a", "b")
    ]
    assert found == [list(its) for its in expected]


@pytest.mark.engine
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
