"""Which images, videos and sounds a key can be trusted to name.

A key holds each item's `identifier`, which is also the item's key in vllm's processor, encoder and
prefix caches. An identifier is a digest of the content (`MultiModalHasher`, hex) or, if the client
supplied one, its `uuid` verbatim, which two images may share. (With both of vllm's caches off it
is a number of the request.) The request does not say which kind it is, so the form decides.

Not detected: a uuid that looks like a digest, whether chosen so or hashed by vllm together with the
request's own processor settings. The item's content is no help: vllm's caches use the same
identifier, so the computed item need not be the one that arrived. Against clients that forge
uuids, drop `uuid` at the front door or set `images` to "none" (threats.md, T1).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from vllm.v1.request import Request

Images = Literal["hashed", "none"]

_DIGEST: Final = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")
"""blake3 and sha256, and sha512."""


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
