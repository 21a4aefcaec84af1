"""`kvstore pd-proxy` as a process: ready, refusals, TLS towards clients, its end."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from kvstore.testing.index_process import Lab
from kvstore.testing.pd_process import PdProxyProcess
from kvstore.testing.process import NodeFailed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

NOBODY, NEITHER = 9, 10
"""No server is at the port `discard`, nor at the one after it."""


def ask(url: str, body: bytes | None = None, tls: ssl.SSLContext | None = None) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, body, timeout=20, context=tls) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_it_serves_and_says_what_it_cannot(tmp_path: Path) -> None:
    with PdProxyProcess.start(tmp_path, prefill=[NOBODY], decode=[NEITHER]) as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        assert ask(f"{url}/health")[0] == 503
        status, text = ask(f"{url}/v1/completions", b'{"prompt": "secret words"}')
        assert (status, json.loads(text)["error"]["code"]) == (502, 502)
        assert ask(f"{url}/v1/models")[0] == 502
        assert ask(f"{url}/metrics")[0] == 404
        assert proxy.stop() == 0
    log = (tmp_path / "proxy.log").read_text()
    assert "the decode engine computes" in log
    assert "secret" not in log


def test_clients_can_have_tls(tmp_path: Path) -> None:
    files = Lab(tmp_path / "pki").files("client", "proxy")
    flags = ("--cert", str(files.cert), "--key", str(files.key))
    with PdProxyProcess.start(tmp_path, prefill=[NOBODY], decode=[NEITHER], flags=flags) as proxy:
        context = ssl.create_default_context(cafile=str(files.ca))
        context.check_hostname = False  # the certificate has no address
        assert ask(f"https://127.0.0.1:{proxy.port}/health", tls=context)[0] == 503


def test_an_address_that_is_taken_is_one_sentence(tmp_path: Path) -> None:
    with PdProxyProcess.start(tmp_path, prefill=[NOBODY], decode=[NEITHER]) as proxy:
        flags = ("--listen", f"127.0.0.1:{proxy.port}")
        (tmp_path / "second").mkdir()
        with pytest.raises(NodeFailed) as failed:
            PdProxyProcess.start(tmp_path / "second", prefill=[1], decode=[2], flags=flags)
    assert failed.value.code == 2
    (line,) = failed.value.stderr.strip().splitlines()
    assert line == (
        f"kvstore: --listen cannot listen on 127.0.0.1:{proxy.port}: the address is in use; choose"
        " another --listen"
    )
