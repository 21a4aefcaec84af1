"""Where a router listens: an address that is taken is one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.testing.process import NodeFailed, RouterProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

NOBODY = ("--worker", "a=http://127.0.0.1:9")
"""No server is at the port `discard`."""


def test_an_address_that_is_taken_is_one_sentence(tmp_path: Path) -> None:
    with RouterProcess.start(tmp_path, NOBODY) as router:
        (tmp_path / "second").mkdir()
        with pytest.raises(NodeFailed) as failed:
            RouterProcess.start(tmp_path / "second", [*NOBODY, "--listen", router.address])
        assert failed.value.code == 2
        *_, line = failed.value.stderr.strip().splitlines()
        assert line == (
            f"kvstore: --listen cannot listen on {router.address}: the address is in use; choose"
            " another --listen"
        )
        assert router.stop() == 0
