"""Certificates that end: seen coming, and renewed without losing what is in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.client.certificates import load
from kvstore.supervisor.sockets import UpgradeRefused, ask_for_upgrade
from kvstore.testing.raw_engine import RawEngine, make_keys
from tests.integration.cluster.kit import CONVERGES_S, Site, becomes
from tests.integration.node.conftest import eventually
from tests.kit.gauges import samples

pytestmark = pytest.mark.slow

KEYS = make_keys(3, seed="renewal")
ENDS = "kvstore_certificate_expires_timestamp_seconds"
"""When the certificate ends that a component was started with."""


def test_an_upgrade_takes_up_a_new_certificate_and_keeps_what_is_in_memory(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with (
        site.index() as index,
        site.client(index.address) as client,
        site.node("n1", "--index", index.address, "--peer-listen", "127.0.0.1:0") as node,
    ):
        assert "the certificate of i1.index.kvstore ends at" in index.log
        assert samples(index)[ENDS] == load(site.lab.files("index", "i1")).ends_s
        assert "the certificate of n1.node.kvstore ends at" in node.log
        old = site.lab.files("node", "n1")
        assert samples(node)[ENDS] == load(old).ends_s
        with RawEngine(node.socket) as engine:
            engine.open()
            engine.store(KEYS)
            assert becomes(client, KEYS, {"n1": 3})
        for file in (old.cert, old.key):
            file.unlink()
        new = load(site.lab.files("node", "n1", days=90))
        said = len(node.log)
        assert "3 blocks" in ask_for_upgrade(node.socket)
        assert samples(node)[ENDS] == new.ends_s
        assert "the certificate of" not in node.log[said:]
        with RawEngine(node.socket) as engine:  # of which the node learns what a whole block is
            engine.open()
            assert becomes(client, KEYS, {"n1": 3})


def test_a_file_that_is_wrong_keeps_the_node_away_until_it_is_mended(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.node("n1", "--index-listen", "127.0.0.1:0", with_index=True) as node:
        with RawEngine(node.socket) as engine:
            engine.open()
            engine.store(KEYS)
        key = site.lab.files("node", "n1").key
        good = key.read_bytes()
        key.write_bytes(b"none")
        with pytest.raises(UpgradeRefused, match="the new code cannot start, and the log says why"):
            ask_for_upgrade(node.socket)
        assert "is no private key in PEM form" in node.log
        key.write_bytes(good)
        assert eventually(lambda: "3 blocks" in node.log, timeout_s=CONVERGES_S)
