"""Prompts and their keys: images, and the tail behind the last whole block.

A key holds each image's `identifier`, which is also the item's key in vllm's processor, encoder and
prefix caches. An identifier is a digest of the content (`MultiModalHasher`, hex) or, if the client
supplied one, its `uuid` verbatim, which two images may share. (With both of vllm's caches off it
is a number of the request.) The request does not say which kind it is, so the form decides.

Not detected: a uuid that looks like a digest, whether chosen so or hashed by vllm together with the
request's own processor settings. The item's content is no help: vllm's caches use the same
identifier, so the computed item need not be the one that arrived. Against clients that forge
uuids, drop `uuid` at the front door or set `images` to "none" (threats.md, T1).

vLLM names whole blocks only, so a decode engine would compute up to a block of tokens that the
prefill engine has computed. Their tail has a key of its own, made from the key of the block before
it and its tokens; both engines of a transfer make the same one (ADR 12). Engines without tails:
those with several KV cache groups, served or not (`SchedulerSide`), or with drafts that exclude the
last block of a hit (`SchedulerCore.new_request`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from kvstore.wire.transfers import DecodePart, PrefillPart

if TYPE_CHECKING:
    from vllm.v1.request import Request

Images = Literal["hashed", "none"]

_DOMAIN: Final = b"kvstore prompt tail 1 "
"""Begin of the bytes that a tail's key is a digest of: vLLM's keys are digests of CBOR, which never
begins like this."""
_DIGEST: Final = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")
"""Hex digests of blake3 and sha256, and of sha512."""


def why_left_out(request: Request, images: Images) -> str:
    """The outcome of a request that is neither stored nor loaded because of its images, video or
    audio; empty when it may be."""
    if not request.mm_features:
        return ""
    if images == "none":
        return "images off"
    if all(_DIGEST.fullmatch(feature.identifier) for feature in request.mm_features):
        return ""
    return "image uuid"


def tail_key(
    request: Request,
    keys: Sequence[bytes],
    transfer: PrefillPart | DecodePart | None,
    block_tokens: int,
) -> bytes:
    """Key of the prompt's tail; empty: it has none. `keys`: of its whole blocks. `block_tokens`:
    tokens of a block; 0: no prompt of the engine has a tail.

    Prompts without a tail: those shorter than a block (the salt is in the key of the first one),
    with images or embeddings (which their tokens do not name), or whose prefill engine goes on to
    decode and writes into the same block. A tail of one token is computed in any case.
    """
    if transfer is None or not block_tokens:
        return b""
    whole, rest = divmod(request.num_prompt_tokens, block_tokens)
    tokens = request.prompt_token_ids
    if tokens is None or not (rest > 1 and 0 < whole <= len(keys)):
        return b""
    if request.mm_features or request.prompt_embeds is not None:
        return b""
    if isinstance(transfer, PrefillPart) and request.max_tokens != 1:
        return b""
    tail = np.array(tokens[whole * block_tokens :], "<u4").tobytes()
    return hashlib.sha256(_DOMAIN + bytes(keys[whole - 1]) + tail).digest()
