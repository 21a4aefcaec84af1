"""Nothing that a node, its pages or its commands say outside holds a key, a token or a block (T12).

Marked keys, tokens and bytes are planted, every way to go wrong is gone, and all that was said is
searched. KV events are left out: to publish hashes is what they are for.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvstore.index.chain import block_keys
from kvstore.proto import inspect_pb2 as pb
from kvstore.proto.inspect_pb2_grpc import InspectStub
from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import BLOCK_TOKENS, RawEngine
from kvstore.wire.messages import Distrust, LeaseAsk, Seal, Story, encode
from tests.integration.node.conftest import eventually, has_all_dram, tiers
from tests.integration.node.test_attach import introduce, raw_socket, send
from tests.kit.command import kvstore
from tests.kit.gauges import page

pytestmark = pytest.mark.slow

TOKENS = [90_210_000 + number for number in range(2 * BLOCK_TOKENS)]
PROMPT = "Xyzzy-plugh-4711"
KEYS = block_keys(TOKENS, block_tokens=BLOCK_TOKENS, seed="0")


def traces() -> Iterator[bytes]:
    """What must not be found: more than 8 digits of a key, a token, or the prompt."""
    for key in KEYS:
        yield key[:5].hex().encode()
        yield key[:5].hex().upper().encode()
        yield key[:6]
        yield repr(key[:6])[2:-1].encode()
    yield from (str(token).encode() for token in TOKENS)  # 8 digits: fewer are met by chance
    yield PROMPT.encode()


def command(*arguments: str, node: NodeProcess | None = None) -> bytes:
    """What a command says, on both of its streams."""
    where = ["--socket", str(node.socket)] if node else []
    done = kvstore(*arguments, *where, columns="200")
    return (done.stdout + done.stderr).encode()


def pages(node: NodeProcess) -> Iterator[bytes]:
    its = ("/", "/app.js", "/state.json", "/request.json?id=1")
    for path in ("/metrics", "/healthz", *its, f"/{PROMPT[:1]}"):
        yield page(node, path)[1].encode()


def misuse(node: NodeProcess, engine: RawEngine) -> None:
    """Go wrong in every way that has something to tell of keys."""
    reply = engine.lease_stored(KEYS)
    engine.ranks[0].send(Distrust(slots=reply.slots, generations=reply.generations))
    bad = [
        encode(LeaseAsk(lease=1, keys=KEYS[0])).replace(b"lease", b"l\xffase"),
        encode(LeaseAsk(lease=1, keys=KEYS[0]))[:-3],
        encode(LeaseAsk(lease=1, keys=KEYS[0] + KEYS[1][:7])),
        encode(Seal(9, KEYS[0], bytes(4), bytes(8), bytes(16))),
        encode(Story(request="r", detail=f"{KEYS[0]!r}"[:8])),
        KEYS[0] + PROMPT.encode(),
    ]
    for datagram in bad:
        with raw_socket(node) as sock:
            introduce(sock)
            send(sock, datagram)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass


def refusals(node: NodeProcess) -> Iterator[bytes]:
    """What gRPC answers to requests that go wrong."""
    with grpc.insecure_channel(f"unix:{node.socket}.rpc") as channel:
        stub = InspectStub(channel)
        for prompt in (
            pb.Prompt(space=bytes(32), tenant="t", keys=KEYS[0][:-1]),
            pb.Prompt(space=KEYS[0], tenant="t", keys=KEYS[0] * 5_000),
            pb.Prompt(space=KEYS[0], tenant="t", keys=KEYS[0]),
        ):
            request = pb.RowsRequest(topic="prefix", filter=pb.Filter(prompt=prompt))
            try:
                yield str(stub.Rows(request, timeout=20)).encode()
            except grpc.RpcError as error:
                yield str(error).encode()


def test_no_key_token_or_prompt_is_said_anywhere(tmp_path: Path) -> None:
    store = tmp_path / "store"
    good, bad = tmp_path / "tokens", tmp_path / "no-tokens"
    good.write_text(" ".join(map(str, TOKENS)))
    bad.write_text(PROMPT)
    flags = ["--file", f"{store}:64MiB", "--log-level", "debug"]
    said: list[bytes] = []
    with NodeProcess.start(tmp_path, flags=flags) as node:
        with RawEngine(node.socket) as engine:
            engine.open()
            engine.store(KEYS)
            assert eventually(lambda: tiers(node)["file"]["blocks"] == len(KEYS))
            misuse(node, engine)
            engine.store(KEYS)
            said.append(command("inspect", "blocks", "--json", node=node))
            for tokens in (good, bad):
                asked = ("inspect", "prefix", "--tokens-file", str(tokens))
                said.append(command(*asked, node=node))
            said.append(command("inspect", "prefix", "--text", PROMPT, node=node))
            said += [command("inspect", node=node), command("explain", "r", node=node)]
            said += [*pages(node), *refusals(node)]
        assert node.stop() == 0
        said.append(node.log.encode())
    for path in store.glob("seg-*.kv"):
        data = bytearray(path.read_bytes())
        data[3 * 4096] ^= 1
        path.write_bytes(data)
    said.append(command("fsck", str(store)))
    with NodeProcess.start(tmp_path, flags=flags) as node, RawEngine(node.socket) as engine:
        engine.open()
        assert eventually(lambda: has_all_dram(node))
        engine.lease(KEYS)
        said.append(node.log.encode())
    whole = b"\n".join(said)
    assert len(whole) > 5_000
    assert KEYS[1][:4].hex().encode() in whole, "nothing is told of keys: the search tests nothing"
    assert not [trace for trace in traces() if trace in whole]
