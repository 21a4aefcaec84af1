"""A node whose host has vanished: nobody hangs up in its name."""

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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PEER = """if True:
    import sys, threading
    import grpc
    from kvstore.wire.peers import PEERS, PeerHello, decode_answer, encode

    def words():
        yield PeerHello("x", 7)
        threading.Event().wait()

    with grpc.insecure_channel(sys.argv[1]) as channel:
        answers = channel.stream_stream(f"/{PEERS}/Session", encode, decode_answer)(words())
        print(next(answers).node, flush=True)
        threading.Event().wait()
"""
GONE_S = 90.0
"""Pings take 13 s to tell; a server that sends none takes two hours."""


def test_a_peer_that_is_silent_is_hung_up_on(tmp_path: Path) -> None:
    listens = ("--index-listen", "127.0.0.1:0", "--peer-listen", "127.0.0.1:0", "--insecure")
    with NodeProcess.start(tmp_path, flags=(*listens, "--transport", "tcp")) as node:
        found = re.search(r"peers=(\S+:(\d+))/tcp", node.ready_line)
        assert found is not None
        peer = subprocess.Popen(
            [sys.executable, "-c", PEER, found[1]], stdout=subprocess.PIPE, text=True
        )
        try:
            assert read_line(peer, GONE_S)
            server, port = psutil.Process(node.pid), int(found[2])

            def is_connected() -> bool:
                return any(
                    each.laddr.port == port and each.status == "ESTABLISHED"
                    for each in server.net_connections(kind="inet")
                )

            assert is_connected()
            peer.send_signal(signal.SIGSTOP)
            assert eventually(lambda: not is_connected(), timeout_s=GONE_S)
        finally:
            reap(peer)
