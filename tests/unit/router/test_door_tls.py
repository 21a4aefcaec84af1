"""TLS of the router's door where a container has no directory to write to."""

from __future__ import annotations

import ssl
import tempfile
from pathlib import Path

import pytest

from kvstore.client.certificates import load
from kvstore.router.front.door import server_context
from kvstore.testing.process import Lab

NAME = "r.client.kvstore"


def test_a_handshake_needs_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = load(Lab(tmp_path).files("client", "r"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)  # as with a read-only root
    context = server_context(tls, demands_certificates=False)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    client = ssl.create_default_context(cadata=tls.ca.decode()).wrap_bio(
        to_client, to_server, server_hostname=NAME
    )
    for end in (client, server, client, server, client):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    assert client.getpeercert()
