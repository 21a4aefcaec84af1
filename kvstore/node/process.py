"""A node process: started by the supervisor, ends with it, and leaves it what it holds.

    python -P -m kvstore.node.process DESCRIPTOR PARENT

Covers: exit status and the sentence for an operator. Does not cover: what a node is (`node`).
"""

from __future__ import annotations

import socket
import sys

from kvstore.net.process import die_with, harden_process

EXIT_POISONED = 70
"""EX_SOFTWARE: a bug of ours; the supervisor starts another process."""


def serve(sock: socket.socket) -> int:
    """Be the node of the supervisor at the other end; returns the exit status."""
    # Only here: a process that outlived its supervisor ends before it has loaded anything.
    from kvstore.config.node import load_config
    from kvstore.errors import ConfigError
    from kvstore.node.driver import Poisoned
    from kvstore.node.node import run_node
    from kvstore.obs import logs
    from kvstore.supervisor import control
    from kvstore.supervisor.handover import Handover, SupervisorGone

    try:
        with Handover(sock) as handover:
            begin = handover.begin
            config = load_config(None, begin.settings, arena=(begin.dram_bytes, begin.dram_note))
            logs.setup(config.log_level)
            run_node(config, handover)
    except ConfigError as error:
        return _fail(str(error), control.EXIT_REFUSED)
    except Poisoned as error:
        return _fail(f"stopped to protect readers: {error}", EXIT_POISONED)
    except SupervisorGone:
        return 1
    return 0


def _fail(sentence: str, code: int) -> int:
    sys.stderr.write(f"kvstore: {sentence}\n")
    return code


def main(arguments: list[str]) -> int:
    """`arguments`: number of the control socket's descriptor, pid of the supervisor."""
    die_with(int(arguments[1]))
    harden_process()
    return serve(socket.socket(fileno=int(arguments[0])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
