"""Whose host has vanished: nobody hangs up in its name, so servers ask whether it is there."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kvstore.testing.process import NodeProcess, read_line, reap
from tests.integration.node.conftest import eventually
from tests.kit.peers import metric

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = """if True:
    import sys, threading
    import grpc
    from kvstore.client.index import IndexClient
    from kvstore.wire.peers import PEERS, PeerHello, decode_answer, encode

    def words():
        yield PeerHello("x", 7)
        threading.Event().wait()

    with (
        grpc.insecure_channel(sys.argv[1]) as channel,
        IndexClient([sys.argv[2]], insecure=True) as index,
    ):
        answers = channel.stream_stream(f"/{PEERS}/Session", encode, decode_answer)(words())
        next(answers)
        news = index.watch()
        next(news)
        print("both answered", flush=True)
        threading.Event().wait()
"""
GONE_S = 90.0
"""Pings take 15 s to tell; a server that sends none takes two hours."""


def test_a_peer_and_a_watcher_that_are_silent_are_hung_up_on(tmp_path: Path) -> None:
    listens = ("--index-listen", "127.0.0.1:0", "--peer-listen", "127.0.0.1:0", "--insecure")
    with NodeProcess.start(tmp_path, flags=(*listens, "--transport", "tcp")) as node:
        found = re.search(r"peers=(\S+:(\d+))/tcp", node.ready_line)
        assert found is not None
        silent = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, found[1], node.index],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert read_line(silent, GONE_S)
            server, port = psutil.Process(node.pid), int(found[2])

            def heard() -> tuple[bool, float]:
                """Whether there is a connection of a peer, and the number of watchers."""
                connections = server.net_connections(kind="inet")
                places = [each.laddr.port for each in connections if each.status == "ESTABLISHED"]
                return port in places, metric(node, "kvstore_index_watchers")

            assert heard() == (True, 1)
            silent.send_signal(signal.SIGSTOP)
            assert eventually(lambda: heard() == (False, 0), timeout_s=GONE_S)
        finally:
            reap(silent)
