"""Fixtures of all tests that start a real engine; conftest files import them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.testing.models import build_model
from kvstore.testing.workload import Encode


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2.5 M parameters, 4 layers: 512 KiB of KV a block in float32."""
    return build_model(tmp_path_factory.mktemp("tiny") / "model", size="tiny")


@pytest.fixture(scope="session")
def medium_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slow enough to prefill that a kill can land in the middle."""
    return build_model(tmp_path_factory.mktemp("medium") / "model", size="medium")


@pytest.fixture(scope="session")
def encode(tiny_model: Path) -> Encode:
    """The models' tokenizer; one for all sizes."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    return encode
