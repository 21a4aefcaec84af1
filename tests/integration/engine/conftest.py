"""The engine tests' fixtures."""

from __future__ import annotations

from tests.integration.engine.fixtures import (
    encode,
    medium_model,
    prompts,
    reference,
    tiny_model,
)

__all__ = ["encode", "medium_model", "prompts", "reference", "tiny_model"]
