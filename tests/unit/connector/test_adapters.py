"""Digests of LoRA adapters, and keys of requests that have one."""

from __future__ import annotations

import gc
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvstore.connector import prompts as module
from kvstore.connector.prompts import (
    LOOK_NS,
    LOOK_NS_MAX,
    READ_NS_MAX,
    Adapters,
    adapter_keys,
)
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


def read(adapters: Adapters, adapter: Any, now_ns: int = 0) -> bytes | str:
    """Its digest, when it has been read."""
    found: bytes | str = until(lambda: adapters.look(adapter, now_ns))
    return found


def until(look: Callable[[], Any]) -> Any:
    for _ in range(int(WAIT_S * 1000)):
        found = look()
        if found is not None:
            return found
        threading.Event().wait(0.001)
    raise TimeoutError


class Clock:
    """Goes on by a look's pause each time that it is read."""

    def __init__(self) -> None:
        self.now_ns = 0

    def tick(self) -> int:
        self.now_ns += LOOK_NS
        return self.now_ns


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


def test_a_disk_that_hangs_keeps_nobody_waiting_for_longer_than_once(
    adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read = threading.Event()

    def slow(path: Path) -> Any:
        assert may_read.wait(WAIT_S)
        return digest_path(path)

    monkeypatch.setattr(module, "digest_path", slow)
    adapter = named(write(tmp_path / "a"))
    assert adapters.look(adapter, 5) is None
    assert adapters.look(adapter, 4 + READ_NS_MAX) is None
    # All requests wait for the same end, and later ones not at all.
    assert isinstance(adapters.look(adapter, 5 + READ_NS_MAX), str)
    may_read.set()
    assert isinstance(until(lambda: _bytes(adapters.look(adapter, READ_NS_MAX))), bytes)


def test_files_that_cannot_be_looked_at_again_are_not_trusted(
    adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = named(write(tmp_path / "a"))
    digest = read(adapters, adapter)
    may_look, stamp = threading.Event(), module._stamp

    def slow(path: Path) -> Any:
        assert may_look.wait(WAIT_S)
        return stamp(path)

    monkeypatch.setattr(module, "_stamp", slow)
    begun_ns = LOOK_NS
    assert adapters.look(adapter, begun_ns) == digest
    assert adapters.look(adapter, begun_ns + LOOK_NS_MAX - 1) == digest
    assert isinstance(adapters.look(adapter, begun_ns + LOOK_NS_MAX), str)
    may_look.set()
    assert until(lambda: _bytes(adapters.look(adapter, begun_ns + LOOK_NS_MAX))) == digest


def _bytes(found: object) -> bytes | None:
    return found if isinstance(found, bytes) else None


def test_files_that_change_under_the_engine_end_the_service_of_that_number(
    adapters: Adapters, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, clock = write(tmp_path / "a"), Clock()
    before = read(adapters, named(folder))
    write(folder, seed=2)

    def refusal() -> str | None:
        found = adapters.look(named(folder), clock.tick())
        return found if isinstance(found, str) else None

    assert "changed" in until(refusal)
    write(folder)
    for _ in range(3):
        assert refusal() is not None, "nor ever again"
    assert len([line for line in caplog.messages if "changed" in line]) == 1
    assert read(adapters, named(folder, 2), clock.now_ns) == before, "under another number it is"


def test_another_adapter_under_the_same_number_is_not_served(
    adapters: Adapters, tmp_path: Path
) -> None:
    one, other = write(tmp_path / "a"), write(tmp_path / "b", seed=2)
    digest = read(adapters, named(one))
    # Loaded in place, whether a request says so or only its path shows it.
    assert isinstance(adapters.look(named(other), 0), str)
    assert isinstance(adapters.look(named(one, in_place=True), 0), str)
    assert adapters.look(named(one), 0) == digest


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
    adapter = named(folder, in_place=what == "in place")
    found = read(adapters, adapter)
    assert isinstance(found, str)


def test_what_is_known_of_an_adapter_is_never_forgotten(
    adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read again, its files might be others than those that the engine has loaded."""
    monkeypatch.setattr(module, "ADAPTERS_MAX", 3)
    folder = write(tmp_path / "a")
    first = read(adapters, named(folder, 1))
    for number in (2, 3):
        assert read(adapters, named(folder, number)) == first
    assert isinstance(adapters.look(named(folder, 4), 0), str)
    assert adapters.look(named(folder, 1), 0) == first


def test_keys_depend_on_the_adapter_and_grow_with_the_request() -> None:
    request: Any = SimpleNamespace(block_hashes=[bytes([n]) * 32 for n in range(4)])
    one, other = adapter_keys(request, b"1" * 32), adapter_keys(request, b"2" * 32)
    assert [len(key) for key in one] == [32] * 4
    assert not set(one) & set(other)
    assert not set(one) & set(request.block_hashes)
    assert (one[1:3], one[-1]) == ([one[1], one[2]], one[3])
    request.block_hashes.append(b"9" * 32)
    assert len(one) == 5
    assert one[4] == adapter_keys(request, b"1" * 32)[4] not in one[:4]


def test_keys_end_with_their_request_and_wait_for_no_collection() -> None:
    """They hold vLLM's request, with its tokens and images."""

    class OneRequest:
        block_hashes: ClassVar = [b"1" * 32]

    request: Any = OneRequest()
    gone = weakref.ref(request)
    gc.disable()
    try:
        keys = adapter_keys(request, b"1" * 32)
        assert len(keys[0]) == 32
        del request, keys
        assert gone() is None
    finally:
        gc.enable()
