"""A transfer worker child: started by the node process, ends with it or with its socket.

    python -P -m kvstore.peers.transfer_worker_process DESCRIPTOR PARENT

Covers: how the process is protected, and how it ends. Does not cover: what it does
(`transport.transfer_worker`), who starts and kills it (`transfer_worker`).
"""

from __future__ import annotations

import os
import socket
import sys

from kvstore.net.process import die_with, harden_process


def main(arguments: list[str]) -> int:
    """Run the child; returns its exit code. `arguments`: number of the socket's descriptor, pid of
    the parent."""
    die_with(int(arguments[1]))
    harden_process()
    # UCX's copies by process_vm_readv need a peer that may be looked into, which this one is not.
    os.environ.setdefault("UCX_TLS", "^cma")
    # Only here: a process that outlived its parent ends before it has loaded anything.
    from kvstore.transport.transfer_worker import run

    with socket.socket(fileno=int(arguments[0])) as sock:
        return run(sock)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Back ends that are given back in order wait for peers; the kernel does not.
    os._exit(code)
