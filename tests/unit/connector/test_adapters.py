"""Digests of LoRA adapters, and keys of requests that have one."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvstore.connector.adapters import ADAPTERS_MAX, LOOK_NS, AdapterKeys, Adapters
from kvstore.connector.checks import NotServed
from kvstore.connector.weights import digest_path

WAIT_S = 60.0


def write(folder: Path, *, seed: int = 1, **config: Any) -> Path:
    """An adapter's files; the same for the same arguments."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"r": 8, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    weights = np.random.default_rng(seed).random((8, 64), np.float32)
    save_file({"q_proj.lora_A.weight": weights}, str(folder / "adapter_model.safetensors"))
    return folder


def named(path: Path | str, number: int = 1, *, in_place: bool = False) -> Any:
    return SimpleNamespace(
        lora_name="name",
        lora_int_id=number,
        lora_path=str(path),
        load_inplace=in_place,
        is_3d_lora_weight=False,
    )


@pytest.fixture
def adapters() -> Iterator[Adapters]:
    made = Adapters(dtype="torch.bfloat16")
    yield made
    made.close()


def read(adapters: Adapters, adapter: Any, now_ns: int = 0) -> bytes | NotServed:
    """Its digest, when it has been read."""
    deadline = threading.Event()
    for _ in range(int(WAIT_S * 1000)):
        found = adapters.look(adapter, now_ns)
        if found is not None:
            return found
        deadline.wait(0.001)
    raise TimeoutError


def test_equal_files_have_one_digest_and_all_else_another(
    adapters: Adapters, tmp_path: Path
) -> None:
    folders = [
        write(tmp_path / "a"),
        write(tmp_path / "b"),
        write(tmp_path / "weights", seed=2),
        write(tmp_path / "rank", r=4),
        write(tmp_path / "modules", target_modules=["k_proj"]),
    ]
    found = [read(adapters, named(folder, n + 1)) for n, folder in enumerate(folders)]
    assert all(isinstance(digest, bytes) for digest in found)
    assert found[0] == found[1]
    assert len(set(found)) == len(folders) - 1
    others = Adapters(dtype="torch.float32")
    try:
        assert read(others, named(folders[0])) not in found
    finally:
        others.close()


def test_while_files_are_read_there_is_no_digest(
    adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read = threading.Event()

    def slow(path: Path) -> Any:
        assert may_read.wait(WAIT_S)
        return digest_path(path)

    monkeypatch.setattr("kvstore.connector.adapters.digest_path", slow)
    adapter = named(write(tmp_path / "a"))
    assert adapters.look(adapter, 0) is None
    assert adapters.look(adapter, 0) is None
    may_read.set()
    assert isinstance(read(adapters, adapter), bytes)


def test_files_that_change_under_the_engine_end_the_service_of_that_number(
    adapters: Adapters, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path / "a")
    before = read(adapters, named(folder))
    write(folder, seed=2)
    assert adapters.look(named(folder), LOOK_NS - 1) == before, "not looked at yet"
    assert isinstance(adapters.look(named(folder), LOOK_NS), NotServed)
    write(folder)
    assert isinstance(adapters.look(named(folder), 9 * LOOK_NS), NotServed), "nor ever again"
    assert len([line for line in caplog.messages if "changed" in line]) == 1
    assert read(adapters, named(folder, 2), 9 * LOOK_NS) == before, "under another number it is"


@pytest.mark.parametrize("what", ["nowhere", "empty", "in place", "unreadable"])
def test_an_adapter_without_a_certain_digest_is_not_served(
    what: str, adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / what
    if what == "empty":
        folder.mkdir()
    elif what != "nowhere":
        write(folder)
    if what == "unreadable":
        (folder / "adapter_model.safetensors").unlink()
        os.symlink("/proc/self/mem", folder / "adapter_model.safetensors")
    found = read(adapters, named(folder, in_place=what == "in place"))
    assert isinstance(found, NotServed)


def test_numbers_are_forgotten_in_the_end(adapters: Adapters, tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    for number in range(1, ADAPTERS_MAX + 10):
        adapters.look(named(folder, number), 0)
    assert len(adapters._found) == ADAPTERS_MAX


def test_keys_depend_on_the_adapter_and_grow_with_the_request() -> None:
    request: Any = SimpleNamespace(block_hashes=[bytes([n]) * 32 for n in range(4)])
    one, other = AdapterKeys(request, b"1" * 32), AdapterKeys(request, b"2" * 32)
    assert [len(key) for key in one] == [32] * 4
    assert not set(one) & set(other)
    assert not set(one) & set(request.block_hashes)
    assert (one[1:3], one[-1]) == ([one[1], one[2]], one[3])
    request.block_hashes.append(b"9" * 32)
    assert len(one) == 5
    assert one[4] == AdapterKeys(request, b"1" * 32)[4] not in one[:4]
