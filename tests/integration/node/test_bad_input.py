"""10,000 bad inputs over every socket of a real node, which goes on to serve a good engine."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import pytest
import zmq
from google.protobuf.message import Message

from kvstore.proto import inspect_pb2 as pb
from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import RawEngine, make_keys
from kvstore.units import MIB
from kvstore.wire.messages import encode
from tests.amounts import amount, covered
from tests.faults.mutate import Mutator
from tests.faults.words import answers, hellos, words
from tests.integration.node.conftest import eventually, peer_descriptors, resident_bytes
from tests.kit.processes import event_endpoints

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

DATAGRAMS = amount(1_500, nightly=6_500)
CALLS = amount(500, nightly=2_000)
STREAMS = amount(150, nightly=500)
"""Bytes that are no gRPC at all."""
PAGES = amount(150, nightly=500)
REPLAYS = amount(150, nightly=500)
GROWTH_BYTES_MAX = 32 * MIB
PROMPT = pb.Prompt(space=bytes(32), tenant="t", keys=bytes(64))
SERVICE = "/kvstore.inspect.v1.Inspect/"
# Not Clear, of which a mutation may well be one that clears all: `tests/faults/test_bad_input.py`.
REQUESTS: dict[str, list[Message]] = {
    "Rows": [
        pb.RowsRequest(topic="blocks", filter=pb.Filter(limit=7, space="ab")),
        pb.RowsRequest(topic="hashings"),
        pb.RowsRequest(topic="requests", filter=pb.Filter(request="r", limit=3)),
        pb.RowsRequest(topic="ranges", filter=pb.Filter(number=1)),
        pb.RowsRequest(topic="prefix", filter=pb.Filter(prompt=PROMPT)),
        pb.RowsRequest(topic="engines", filter=pb.Filter(prompt=PROMPT)),
    ],
    "State": [pb.StateRequest()],
    "Nothing": [pb.StateRequest()],
}
HEADS = [b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /healthz HTTP/1.0\r\n\r\n"]


def talk(path: Path, hello: bytes | None, datagrams: Sequence[bytes]) -> int:
    """Say these on one connection, as long as the node listens; how many it took."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stray,
    ):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        sock.connect(str(path))  # blocking: a full backlog is waited for
        sock.settimeout(20)
        sent = 0
        with suppress(ConnectionError):
            if hello is not None:
                pidfd = os.pidfd_open(os.getpid())
                try:
                    socket.send_fds(sock, [hello], [pidfd])
                finally:
                    os.close(pidfd)
                sent += 1
            for datagram in datagrams:
                # Some bring sockets that nobody asked for, and that are counted in the end.
                socket.send_fds(sock, [datagram], [stray.fileno()] * (sent % 4 // 3 * 5))
                sent += 1
    return sent


def flood_attach(node: NodeProcess) -> int:
    said = words(7, [(0, 1), (16, 2)]) + answers()
    mutator = Mutator(1, [encode(message) for message in said + hellos()])
    source, sent = mutator.random, 0
    while sent < DATAGRAMS:
        good, bad = encode(source.choice(hellos())), mutator.datagram(source.choice(hellos()))
        hello = source.choice((good, good, bad, None))
        kinds = [source.random() < 0.5 for _ in range(source.randrange(1, 8))]
        datagrams = [
            mutator.next() if is_raw else mutator.datagram(source.choice(said)) for is_raw in kinds
        ]
        sent += talk(node.socket, hello, datagrams)
    return sent


def flood_rpc(node: NodeProcess) -> int:
    path = f"{node.socket}.rpc"
    mutator = Mutator(
        2, [request.SerializeToString() for its in REQUESTS.values() for request in its]
    )
    with grpc.insecure_channel(f"unix:{path}") as channel:
        for number in range(CALLS):
            name = list(REQUESTS)[number % len(REQUESTS)]
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(SERVICE + name)
            with suppress(grpc.RpcError):
                call(mutator.next(), timeout=20)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    garbage = Mutator(3, [preface, preface + bytes(9), preface + b"\0\0\x04\x01\x05\0\0\0\1\x82"])
    for _ in range(STREAMS):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock, suppress(ConnectionError):
            sock.connect(path)
            sock.sendall(garbage.next())
    return CALLS + STREAMS


def flood_http(node: NodeProcess) -> int:
    where = urlsplit(node.metrics_url)
    mutator = Mutator(4, HEADS)
    for _ in range(PAGES):
        address = (where.hostname, where.port)
        with socket.create_connection(address, timeout=20) as sock, suppress(ConnectionError):
            sock.sendall(mutator.next() + b"\r\n\r\n")
            while sock.recv(1 << 16):
                pass
    return PAGES


def flood_replay(node: NodeProcess) -> int:
    mutator = Mutator(5, [b"", (5).to_bytes(8, "big"), b"\xff" * 8])
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(event_endpoints(node)[1])
        for _ in range(REPLAYS):
            frames = [mutator.next()[:200] for _ in range(mutator.random.randrange(1, 4))]
            dealer.send_multipart(frames)
    return REPLAYS


def test_bad_inputs_and_a_good_engine(tmp_path: Path) -> None:
    flags = ["--file", f"{tmp_path / 'store'}:64MiB", "--events", f"ipc://{tmp_path / 'events'}"]
    with NodeProcess.start(tmp_path, flags=flags) as node:
        with RawEngine(node.socket, engine_id="bystander") as bystander:
            bystander.open()
            kept = make_keys(4, seed="bystander")
            bystander.store(kept)
            bystander.release(bystander.lease_stored(kept))
            flood_rpc(node)  # a first time, so that what gRPC keeps for itself is there
            before, resident = peer_descriptors(node), resident_bytes(node)
            floods = [flood_attach, flood_rpc, flood_http, flood_replay]
            random.Random(6).shuffle(floods)
            sent = sum(flood(node) for flood in floods)
            assert sent >= amount(2_400, nightly=10_000)
            covered("bad inputs", sent)
            assert eventually(lambda: peer_descriptors(node) <= before), "something is still open"
            assert resident_bytes(node) <= resident + GROWTH_BYTES_MAX
            assert bystander.read(bystander.lease(kept)) == [
                bystander.contents(key) for key in kept
            ]
        with RawEngine(node.socket, engine_id="later") as later:
            later.open()
            keys = make_keys(4, seed="later")
            later.store(keys)
            assert later.read(later.lease_stored(keys)) == [later.contents(key) for key in keys]
        assert node.stop() == 0
        assert "Traceback" not in node.log, node.log
        assert "bug in the node" not in node.log
