"""The weights' digest: each tensor, file and setting that differs is seen; nothing is loaded."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvstore.connector import weights
from kvstore.connector.checks import NotServed
from kvstore.connector.weights import digest_path, digest_weights

SIZES = {"embed": 300_000, "layers.0.q": 65_536, "layers.0.norm": 512, "layers.1.q": 16_385}


def write_safetensors(file: Path, sizes: dict[str, int], *, fill: dict[str, int]) -> None:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    content, at = b"", 0
    for name, size in sizes.items():
        entries[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        content += bytes([fill.get(name, 1)]) * size
        at += size
    head = json.dumps(entries).encode()
    file.write_bytes(len(head).to_bytes(8, "little") + head + content)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    write_safetensors(folder / "model.safetensors", SIZES, fill={})
    return folder


def digest(path: Path) -> str:
    return digest_path(path).digest


def test_it_is_the_same_again_and_elsewhere(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "another name"
    shutil.copytree(model, copy)
    (copy / "tokenizer.json").write_text("other text, no weights")
    assert digest(model) == digest(model) == digest(copy)


@pytest.mark.parametrize("are_sampled", [False, True])
def test_every_tensor_counts(
    model: Path, monkeypatch: pytest.MonkeyPatch, *, are_sampled: bool
) -> None:
    if are_sampled:  # there are too many to sample well
        monkeypatch.setattr(weights, "PIECES_MAX", 2)
        monkeypatch.setattr(weights, "WHOLE_BYTES_MAX", 0)
    before = digest(model)
    for name in SIZES:
        write_safetensors(model / "model.safetensors", SIZES, fill={name: 2})
        assert digest(model) != before, name


def test_two_tensors_that_change_places_count(model: Path) -> None:
    sizes = {"a": 40_000, "b": 40_000}
    write_safetensors(model / "model.safetensors", sizes, fill={"a": 1, "b": 2})
    before = digest(model)
    write_safetensors(model / "model.safetensors", sizes, fill={"a": 2, "b": 1})
    assert digest(model) != before


def test_the_header_counts(model: Path) -> None:
    before = digest(model)
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"U8", b"I8"))
    assert digest(model) != before


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".gguf"])
def test_other_formats_are_sampled_and_never_loaded(model: Path, suffix: str) -> None:
    (model / "model.safetensors").unlink()
    file = model / f"weights{suffix}"
    file.write_bytes(b"cos\nsystem\n(S'exit 1'\ntR." + bytes(5_000_000))
    before = digest(model)
    file.write_bytes(b"cos\nsystem\n(S'exit 1'\ntR." + bytes(2_500_000) + b"x" * 2_500_000)
    changed = digest(model)
    file.write_bytes(file.read_bytes() + b"x")
    assert len({before, changed, digest(model)}) == 3


def test_configuration_names_and_counts_of_files_count(model: Path) -> None:
    seen = {digest(model)}
    (model / "config.json").write_text('{"model_type": "llama", "rope_theta": 5}')
    seen.add(digest(model))
    (model / "model.safetensors").rename(model / "renamed.safetensors")
    seen.add(digest(model))
    write_safetensors(model / "second.safetensors", {"z": 10}, fill={})
    seen.add(digest(model))
    assert len(seen) == 4


@pytest.mark.parametrize(
    "name",
    ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"],
)
def test_what_is_seen_of_an_image_counts(model: Path, name: str) -> None:
    seen = {digest(model)}
    for text in ('{"size": 224}', '{"size": 448}'):
        (model / name).write_text(text)
        seen.add(digest(model))
    assert len(seen) == 3


def test_nothing_to_read_is_said(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(NotServed):
            digest_path(path)


@given(head=st.binary(max_size=300))
def test_a_file_that_only_looks_like_safetensors_is_no_digest(
    head: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("m")
    (folder / "model.safetensors").write_bytes(head)
    with pytest.raises(NotServed) if len(head) < 10 else contextlib.suppress(NotServed):
        digest_path(folder)


@pytest.mark.parametrize(
    "entries",
    [
        {"a": {"data_offsets": [0, 11]}},
        {"a": {"data_offsets": [5, 3]}},
        {"a": {"data_offsets": [-1, 3]}},
        {"a": {"data_offsets": [0]}},
        {"a": {}},
        [],
    ],
)
def test_offsets_outside_of_the_file_are_no_digest(tmp_path: Path, entries: object) -> None:
    head = json.dumps(entries).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(head).to_bytes(8, "little") + head + bytes(10))
    with pytest.raises(NotServed):
        digest_path(tmp_path)


def config(model: str, load_format: str = "auto", seed: int = 0) -> tuple[Any, Any]:
    return (
        SimpleNamespace(model=model, revision=None, seed=seed),
        SimpleNamespace(load_format=load_format, download_dir=None),
    )


def test_dummy_weights_differ_by_seed_and_from_real_ones(model: Path) -> None:
    found = [
        digest_weights(*config(str(model), "dummy", seed=1)),
        digest_weights(*config(str(model), "dummy", seed=2)),
        digest_weights(*config(str(model))),
    ]
    assert len({each.digest for each in found}) == 3


@pytest.mark.parametrize("load_format", ["tensorizer", "ipc_cache", "someones-plugin"])
def test_weights_from_elsewhere_are_no_digest(model: Path, load_format: str) -> None:
    with pytest.raises(NotServed, match=load_format):
        digest_weights(*config(str(model), load_format))


@pytest.mark.engine
def test_a_model_that_is_nowhere_is_no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("nobody/nothing-at-all", "/absent/folder"):
        with pytest.raises(NotServed, match=name):
            digest_weights(*config(name))


def test_a_large_file_is_read_in_pieces(tmp_path: Path) -> None:
    sizes = {f"layers.{n}": 50 << 20 for n in range(8)}
    at, entries = 0, {}
    for name, size in sizes.items():
        entries[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(entries).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + at)  # sparse: 400 MiB that take no room
    assert digest_path(tmp_path).read_bytes < 1 << 20
