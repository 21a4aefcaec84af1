"""Paths of the API: which reach an engine, and what the router does with each.

    POST of PROMPTS           routed by prefix and load; kv_transfer_params, salts, media
    POST of a form            the same, by load: the form goes on as it came
    /v1/responses/{id}…       to the worker that stored the response
    /health, /ping, /livez    answered here, and need no API key: load balancers have none
    any other path            to the least busy worker, as it came (`is_passed_on`)

Not passed on is what manages an engine (sleep, weights, adapters, caches) or shows its metrics: it
is for its operator, and done to one of several engines it would make them differ. With API keys
only paths are open whose bodies get a tenant's salt, and some that have no bodies.
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
STORED: Final = re.compile(r"/v1/responses/([A-Za-z0-9_-]{1,256})(/cancel|/input_items)?")
"""Path of a stored response; group 1 is its id."""
ALIVE: Final = "/livez"
PROBED: Final = frozenset({ALIVE, "/health", "/ping"})
"""Paths that need no API key: Kubernetes and load balancers have none."""
PROMPT_METHODS: Final = ("POST",)
KEPT_METHODS: Final = ("GET", "POST", "DELETE")
PASSED_METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE")
_SHOWN: Final = frozenset({"/version", "/load", "/tokenizer_info"})
"""Paths that tenants may GET."""
_CLOSED: Final = re.compile(
    # The router's own, or of one worker. Engines answer whatever begins with `/metrics`.
    r"^/kvstore/|^/v1/responses/|metrics"
    # vLLM, SGLang, TensorRT-LLM
    r"|abort|adapter|cache|clock_offset|collective_rpc|configure|continue_gen|corpus|dumper|elastic"
    r"|expert|fault_tol|flush|freeze|init_|lora|_memory|open_session|close_session|pause|profile|reset"
    r"|resume|server_info|scal(?:e|ing)_|/set_|shutdown|sleep|slow_down|start_|stop_|transfer|unload"
    r"|wake|weight|world_size"
    # llama.cpp, Ollama, Triton, others
    r"|/props|/slots|/api/(?:blobs|copy|create|delete|pull|push|signout|user)|repository|sharedmemory"
    r"|/trace/|/logging|/admin/|/models?/(?:apply|delete|download|load)",
    re.IGNORECASE,
)
"""Parts of paths that are the router's own, or by which engines are managed."""
_MODEL: Final = re.compile(r"^/v2/models/[^/]+(?=(/versions/\d+)?/(infer|generate))")
"""Beginning of Triton's paths for prompts: the name of a model manages nothing."""


def is_passed_on(path: str, method: str, *, has_tenants: bool) -> bool:
    """Whether requests of a path without a rule of its own go to any worker."""
    if has_tenants:
        return path in _SHOWN and method == "GET"
    return not _CLOSED.search(_MODEL.sub("", path))
