"""What the processes of a node do to themselves, and how a node tells that it is ready."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvstore import __version__
from kvstore.node.node import NodeAssembly

HARDENED = """
import ctypes, resource, sys
from kvstore.net.harden import harden_process
get_dumpable = lambda: ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
before = get_dumpable()
harden_process()
print(before, get_dumpable(), resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard,
      sys.getswitchinterval() < 0.001)
"""


def test_a_node_is_not_dumpable_and_has_all_its_descriptors() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HARDENED], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["1", "0", "True", "True"]


def test_the_ready_line_tells_what_scripts_and_people_need() -> None:
    node: Any = SimpleNamespace(
        _config=SimpleNamespace(
            socket=Path("/run/kvstore/node.sock"),
            dram_bytes=3 << 30,
            dram_note="half of the 6 GiB that the machine has available",
            slab_bytes=64 << 20,
            file=SimpleNamespace(home=Path("/var/lib/kvstore"), capacity_bytes=2 << 40),
        ),
        _http=None,
        _publisher=None,
        _member=SimpleNamespace(tells="10.0.0.1:9470", index="", reached="10.0.0.2:9480/nixl"),
        _arena=SimpleNamespace(huge_pages=False),
        _incarnation=0xAB,
    )
    assert NodeAssembly.ready_line(node) == (
        f"kvstore node ready: version={__version__}"
        " socket=/run/kvstore/node.sock metrics=off events=off index=10.0.0.1:9470"
        " serves-index=off peers=10.0.0.2:9480/nixl"
        " incarnation=00000000000000ab huge-pages=no slab=64 MiB"
        " file=/var/lib/kvstore:2 TiB dram=3 GiB"
        " (half of the 6 GiB that the machine has available)"
    )
