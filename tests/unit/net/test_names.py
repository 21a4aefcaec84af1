"""A certificate is of the components in its DNS names, wherever it is shown."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from cryptography import x509

from kvstore.cli import certs
from kvstore.client.certificates import load
from kvstore.client.index import channel_options
from kvstore.client.tls import Tls, TlsFiles
from kvstore.net.server import caller_identities, server_credentials
from kvstore.ports import TransportMemory
from kvstore.transport.pieces import make_pieces
from kvstore.transport.tcp import Tcp
from kvstore.wire.identity import Identity
from kvstore.wire.transfer_worker import Direction, Failed

SIZE = 4096
CALLER = Identity("client", "a")


@pytest.fixture
def pki(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of an index, a node b, and a client whose certificate has names of nodes of other kinds."""
    others = [Identity("index", "i"), Identity("node", "b")]
    certs.make_certificates(tmp_path, others, hosts=["b"])
    names = certs._names

    def all_kinds(*args: Any, **options: Any) -> list[x509.GeneralName]:
        uris = map(x509.UniformResourceIdentifier, ("b.node.kvstore", "index.kvstore"))
        return [*names(*args, **options), *uris, x509.RFC822Name("c.node.kvstore")]

    monkeypatch.setattr(certs, "_names", all_kinds)
    certs.make_certificates(tmp_path, [CALLER])
    return tmp_path


def files(pki: Path, stem: str) -> TlsFiles:
    return TlsFiles(ca=pki / "ca.crt", cert=pki / f"{stem}.crt", key=pki / f"{stem}.key")


def options(pki: Path, stem: str) -> dict[str, str]:
    its = files(pki, stem)
    return {"ca": str(its.ca), "certificate": str(its.cert), "key": str(its.key)}


async def _seen(server_tls: Tls, caller: Tls) -> frozenset[Identity]:
    seen = []

    async def behavior(request: bytes, context: Any) -> bytes:
        seen.append(caller_identities(context))
        return b""

    handler: Any = grpc.unary_unary_rpc_method_handler(behavior)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", {"M": handler}),))
    port = server.add_secure_port("127.0.0.1:0", server_credentials(server_tls))
    await server.start()
    credentials, place = caller.channel_credentials(), f"127.0.0.1:{port}"
    try:
        async with grpc.aio.secure_channel(place, credentials, channel_options()) as channel:
            ask: Any = channel.unary_unary("/t/M")
            await ask(b"", timeout=60)
    finally:
        await server.stop(0)
    return seen[0]


def test_of_who_calls(pki: Path) -> None:
    ends = (load(files(pki, "index-i")), load(files(pki, "client-a")))
    assert asyncio.run(_seen(*ends)) == {CALLER}


def test_of_who_is_called(pki: Path) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        asyncio.run(_seen(load(files(pki, "client-a")), load(files(pki, "index-i"))))
    assert "Hostname Verification" in str(refused.value.details())


def test_of_ones_own_files(pki: Path) -> None:
    assert load(files(pki, "client-a")).identities == {CALLER}


def test_of_who_reads_from_the_transfer_worker(pki: Path) -> None:
    arena = np.zeros(SIZE, np.uint8)
    memory = TransportMemory(arena, arena)
    owner = Tcp("b", memory, options(pki, "node-b"))
    reader = Tcp("a", memory, options(pki, "client-a"))
    try:
        reader.connect("b", owner.describe())
        reader.post(1, "b", make_pieces([0], [0], [SIZE]), Direction.READ)
        outcomes = reader.poll()
        while not outcomes:
            owner.poll()
            outcomes = reader.poll()
        assert [type(each) for each in outcomes] == [Failed]
    finally:
        reader.close()
        owner.close()
