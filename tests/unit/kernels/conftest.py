"""The kernels as a program of this host."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.host_kernels import compile_kernels


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_kernels(tmp_path_factory.mktemp("kernels"))
