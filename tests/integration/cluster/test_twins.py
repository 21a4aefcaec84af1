"""One certificate on two machines: both nodes and the index say it, in the log and in /healthz."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvstore.testing.process import NodeProcess
from tests.integration.cluster.kit import CONVERGES_S, Site
from tests.integration.node.conftest import eventually
from tests.kit.gauges import page
from tests.kit.processes import IndexProcess

pytestmark = pytest.mark.slow


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.fixture
def index(site: Site) -> Iterator[IndexProcess]:
    with site.index("i1", "--metrics", "127.0.0.1:0") as index:
        yield index


def knows_of_another(process: NodeProcess) -> bool:
    return "another process, at 127.0.0.1, " in page(process, "/healthz")[1]


def test_two_processes_with_one_name_are_told_apart(site: Site, index: IndexProcess) -> None:
    elsewhere = site.directory / "elsewhere"
    elsewhere.mkdir()
    flags = (*site.lab.flags("node", "n1"), "--index", index.address)
    with site.node("n1", "--index", index.address) as one:
        assert eventually(lambda: page(one, "/healthz") == (200, "ok\n"), timeout_s=CONVERGES_S)
        with NodeProcess.start(elsewhere, dram="8MiB", flags=flags) as other:
            for process in (one, other):
                assert eventually(partial(knows_of_another, process), timeout_s=CONVERGES_S)
            assert "two processes claim to be node n1" in page(index, "/healthz")[1]
            assert [node.log.count("another process, at") for node in (one, other)] == [1, 1]
            assert index.log.count("is node n1 already") == 1
        # It has the name for itself again.
        assert eventually(lambda: page(one, "/healthz") == (200, "ok\n"), timeout_s=CONVERGES_S)
        assert eventually(lambda: page(index, "/healthz") == (200, "ok\n"), timeout_s=CONVERGES_S)
