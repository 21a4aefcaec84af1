"""Which images, videos and sounds a key can be trusted to name.

A key holds each item's `identifier`, by which vllm's processor, encoder and prefix caches know it,
too. It is a digest of the content (`MultiModalHasher`, hex), unless the client gave a `uuid`: that
is taken as it is, and nothing keeps two images from having one. (With both of vllm's caches off it
is a number of the request.) The request does not say which it was, so its form decides.

Not told apart: a uuid that looks like a digest, be it chosen so or hashed by vllm together with the
request's own processor settings. The item's content is no help: the caches above are keyed by the
same name, so what is computed need not be what came. Against clients that do so the front door
drops `uuid`, or `images` is "none" (threats.md, T1).
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
    """The outcome of a request that is neither stored nor loaded for what it holds besides text;
    empty when it may be."""
    if not request.mm_features:
        return ""
    if images == "none":
        return "images off"
    if all(_DIGEST.fullmatch(feature.identifier) for feature in request.mm_features):
        return ""
    return "image uuid"
