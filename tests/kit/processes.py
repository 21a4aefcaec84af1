"""Processes of tests and benchmarks beside those of `kvstore.testing`, and what else they say.

with IndexProcess.start(tmp_path, lab.flags("index", "i1")) as index:
    client = IndexClient([index.address], tls=lab.files("client", "c1"))
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from kvstore.testing.process import READY_TIMEOUT_S, ChildServer, Lab, NodeProcess, RouterProcess


class IndexProcess(ChildServer):
    """One `kvstore index`, whose log is in a directory."""

    @classmethod
    def start(
        cls,
        directory: Path,
        flags: Sequence[str] = ("--insecure",),
        *,
        listen: str = "127.0.0.1:0",
        name: str = "index",
        timeout_s: float = READY_TIMEOUT_S,
    ) -> IndexProcess:
        """Start an index and wait for its ready line. `flags` come last, so they take precedence.

        Raises:
            NodeFailed: it exited, or was not ready in time.
        """
        log, own = directory / f"{name}.log", ("--listen", listen, "--plain")
        return cls._run(log, "index", *own, *flags, timeout_s=timeout_s)


def transport_options(lab: Lab, name: str) -> dict[str, str]:
    """Options of the tcp transport, for a transfer worker whose certificate names just `name`."""
    files = lab.files("node", name, hosts=[name])
    return {"ca": str(files.ca), "certificate": str(files.cert), "key": str(files.key)}


def event_endpoints(node: NodeProcess) -> tuple[str, str]:
    """Endpoints of KV events and of their replay."""
    found = re.search(r"events=([^ ,]+),(\S+)", node.ready_line)
    assert found is not None, "the node publishes no events"
    return found[1], found[2]


def route_address(router: RouterProcess) -> str:
    """HOST:PORT of kvstore.v1.Router, on loopback."""
    found = re.search(r"route=([0-9]+)", router.ready_line)
    assert found is not None, "the router has no such service"
    return f"127.0.0.1:{found[1]}"
