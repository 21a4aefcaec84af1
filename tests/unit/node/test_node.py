"""What the processes of a node do to themselves, and how a node tells that it is ready."""

from __future__ import annotations

import subprocess
import sys

HARDENED = """
import ctypes, resource, sys
from kvstore.net.process import harden_process
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
