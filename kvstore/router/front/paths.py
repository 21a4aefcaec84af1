"""Paths of the API that reach an engine, and what the router does with each.

    POST of PROMPTS           routed by prefix and load; kv_transfer_params, salts, media
    POST of a form            the same, by load: the form goes on as it came
    /v1/responses/{id}…       to the worker that stored the response

Administration of engines (sleep, weights, adapters, caches) is not here: it is not for clients.
"""

from __future__ import annotations

import re
from typing import Final

PROMPTS: Final = frozenset(
    {
        *("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses"),
        *("/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings", "/v2/embed", "/pooling"),
        *("/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
        *("/generative_scoring", "/tokenize", "/detokenize"),
    }
)
AUDIO: Final = re.compile(r"/v1/audio/[a-z]+")
RESPONSES: Final = "/v1/responses"
STORED: Final = re.compile(r"/v1/responses/([A-Za-z0-9_-]{1,256})(/cancel|/input_items)?")
"""A stored response, by its id."""
ALIVE: Final = "/livez"
PROBED: Final = frozenset({ALIVE, "/health"})
"""Without API keys: Kubernetes and load balancers have none."""
FORM: Final = "multipart/form-data"


def takes_prompts(path: str) -> bool:
    """Whether requests of a path are routed."""
    return path in PROMPTS or AUDIO.fullmatch(path) is not None
