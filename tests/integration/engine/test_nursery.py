"""Engines of the tests' nursery: they answer, they end when told, and they end with the nursery."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from kvstore.demo.engine import EngineError
from tests.integration.engine.nursery import EngineNursery
from tests.kit.engines import EngineConfig, scheduler_pid, server_pid, worker_pids

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


def test_nothing_survives_a_nursery_that_is_killed(tiny_model: Path, tmp_path: Path) -> None:
    with EngineNursery() as nursery:
        engine = nursery.start(EngineConfig(model=tiny_model), log=tmp_path / "engine.log")
        pids = [server_pid(engine), scheduler_pid(engine), *worker_pids(engine)]
        assert len(set(pids)) == 3
        nursery.process.kill()
        assert engine.wait(20), "the guard outlives its parent"
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
        with pytest.raises((EngineError, OSError)):
            nursery.start(EngineConfig(model=tiny_model), log=tmp_path / "engine.log")


def test_a_start_that_fails_says_why(vllm: EngineNursery, tiny_model: Path, tmp_path: Path) -> None:
    wrong = EngineConfig(model=tiny_model, arguments=("--tensor-parallel-size", "3"))
    with pytest.raises(EngineError, match=r"ended while starting: .*ValidationError"):
        vllm.start(wrong, log=tmp_path / "engine.log")
