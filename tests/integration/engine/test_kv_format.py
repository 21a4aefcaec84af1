"""The installed vLLM makes the bytes of the KV format that the connector says it makes.

Golden caches were made by vLLM 0.31.0. On one machine all versions of a format gave the same bytes;
on another the sums of a matrix product have another order, so numbers are compared here: they may
differ by a hundredth of what ADR 7 lets pass. A value in another place differs by 1 and more.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from kvstore.connector.mapping import FORMATS
from kvstore.kernels.host import BOUNDS, error_of
from kvstore.testing.process import popen_tied
from tests.amounts import IS_NIGHTLY
from tests.kit.golden_cache import CASES

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

GOLDEN = Path(__file__).parents[2] / "golden" / "kv"
DIFFERENCE_SHARE = 0.01
NAMES = list(CASES) if IS_NIGHTLY else ["llama3-float32"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kv")
    command = [sys.executable, "-m", "tests.kit.golden_cache", str(folder), *NAMES]
    with (folder / "log").open("wb") as log:
        process = popen_tied(command, cwd=Path(__file__).parents[3], stdout=log, stderr=log)
        try:
            assert process.wait(240) == 0, (folder / "log").read_text()[-2000:]
        finally:
            process.kill()
            process.wait()
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_the_cache_is_that_of_its_format(made: Path, name: str) -> None:
    if not (made / name).exists():
        pytest.skip("this processor packs pages in an order that has no golden cache")
    values, version = CASES[name][1], (made / "version").read_text()
    pages = [np.fromfile(path / name, np.uint8) for path in (made, GOLDEN / "vllm-cpu-1")]
    error = error_of(*([page] for page in pages), values=values)
    same = error < BOUNDS[values] * DIFFERENCE_SHARE
    assert same == (FORMATS.get(version) == "vllm-cpu-1"), (
        f"vLLM {version} makes {'the' if same else 'other'} bytes of this format (error "
        f"{error}): correct FORMATS in kvstore.connector.mapping; ADR 2 says how"
    )
    moved = np.roll(pages[1].view(np.uint16), 2 if values == "float32" else 1)
    assert error_of([moved.view(np.uint8)], [pages[1]], values=values) > BOUNDS[values]
