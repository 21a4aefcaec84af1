"""Images by name: real vllm requests, their identifiers made by vllm's own hasher."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvstore.client.core.config import SchedulerConfig
from kvstore.connector.config import ConnectorConfig
from kvstore.connector.prompts import why_left_out
from kvstore.connector.scheduler_side import SchedulerSide
from kvstore.engine.why.reasons import reason_of
from kvstore.obs.reasons import TEXTS
from kvstore.wire import messages as m
from tests.unit.connector.test_scheduler_side import BLOCK_TOKENS, FullSocket, stories

CONFIG = ConnectorConfig(socket="/nowhere")
CORE = SchedulerConfig(
    engine_id="e", nonce="n", process="p", tenant="t", rank_count=1, block_tokens=BLOCK_TOKENS
)
CAT, DOG = (np.full((8, 8, 3), shade, np.uint8) for shade in (1, 2))


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> FullSocket:
    found = FullSocket(room=100)
    monkeypatch.setattr("kvstore.connector.scheduler_side.Link.connect", lambda *_: found)
    return found


def identifier(image: Any, uuid: str | None, *, algorithm: Any = "blake3", **inputs: Any) -> str:
    """How vllm names an image."""
    items = MultiModalDataItems({"image": ImageProcessorItems([image])})
    made = ProcessorInputs([1], items, {"image": [uuid]}, **inputs)
    return str(made.get_mm_hashes("a/model", algorithm)["image"][0])


def request(number: int, *identifiers: str) -> Request:
    """A prompt of 8 blocks with these images, one in each block."""
    init_none_hash(sha256_cbor)
    features = [
        MultiModalFeatureSpec(
            None, "image", name, PlaceholderRange(offset=at * BLOCK_TOKENS, length=4), name
        )
        for at, name in enumerate(identifiers)
    ]
    return Request(
        request_id=f"r{number}",
        prompt_token_ids=[1] * 8 * BLOCK_TOKENS,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=features,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256_cbor),
    )


def test_two_images_with_one_uuid_have_one_key() -> None:
    """What vllm does: the reason for all of this."""
    names = [identifier(image, "mine") for image in (CAT, DOG)]
    assert names == ["mine", "mine"]
    cat, dog = (request(number, name) for number, name in enumerate(names))
    assert cat.block_hashes == dog.block_hashes


def test_an_image_that_its_client_named_is_left_out(link: FullSocket) -> None:
    side = SchedulerSide(CONFIG, CORE)
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
    assert "uuid" in TEXTS[reason_of("image uuid")]


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


def test_a_session_that_gets_an_image_later_is_left_out_from_there_on(link: FullSocket) -> None:
    side = SchedulerSide(CONFIG, CORE)
    session = request(0)
    side.on_new_request(session)
    session.mm_features.extend(request(1, "mine").mm_features)
    assert side.get_num_new_matched_tokens(session, 0) == (0, False)
    assert not [message for message in link.sent if isinstance(message, m.LeaseAsk)]
