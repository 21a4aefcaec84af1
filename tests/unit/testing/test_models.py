"""The local models: built once, reproducible, and surely changed by a wrong cached block."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.kit.models import build_model
from tests.kit.sensitivity import measure_sensitivity

needs_torch = pytest.mark.engine


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("models") / "tiny", size="tiny")


def weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds no model"):
        build_model(tmp_path, size="tiny")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


@needs_torch
def test_equal_recipes_give_equal_bytes(tiny: Path, tmp_path: Path) -> None:
    build_model(tmp_path / "again", size="tiny")
    assert weights(tmp_path / "again") == weights(tiny)


@needs_torch
def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("kvstore.demo.models._write_weights", fail)
    with pytest.raises(OSError, match="disk full"):
        build_model(tmp_path / "m", size="tiny")
    assert list(tmp_path.iterdir()) == []


@needs_torch
def test_a_wrong_block_shows_in_the_tokens(tiny: Path) -> None:
    """The ground under every equality test: were this low, equal tokens would prove nothing."""
    result = measure_sensitivity(tiny, seed=11)
    report = msgspec.json.encode(result)
    assert result.changed_by_other_block == result.trials, report
    assert result.changed_by_one_byte >= 0.7 * result.trials, report
    assert result.distinct_tokens >= 20, report
