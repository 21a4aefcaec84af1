"""The process that a pidfd stands for. Does not cover: waiting for its end (`attach`)."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path


def pid_of(fd: int) -> int | None:
    """The process that a pidfd refers to; 0 or less when it lives in another pid namespace, None
    when `fd` is no pidfd. Works in a process that is not dumpable too."""
    try:
        text = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="utf-8")
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise  # that says nothing of `fd`
        return None
    for line in text.splitlines():
        if line.startswith("Pid:"):
            return int(line.removeprefix("Pid:"))
    return None


def vouches_for(pidfd: int, peer_pid: int) -> bool:
    """Whether `pidfd` may stand for the peer: a pidfd, and of that very process as far as both can
    be seen from this pid namespace. With another's, slots would come back too late or, worse, too
    early."""
    pid = pid_of(pidfd)
    return pid is not None and (pid <= 0 or peer_pid <= 0 or pid == peer_pid)


def _without_name() -> os.stat_result:
    event = os.eventfd(0)
    try:
        return os.fstat(event)
    finally:
        os.close(event)


_WITHOUT_NAME = _without_name()
"""The inode that all descriptors without a name share; asked once, while there are descriptors."""


def process_of(pidfd: int, otherwise: int) -> int:
    """Number below 0 that is the same for all pidfds of a process, also in other pid namespaces.
    Before Linux 6.9 all descriptors without a name share an inode: there it is made of `otherwise`.
    """
    its = os.fstat(pidfd)
    return -1 - (otherwise if os.path.samestat(its, _WITHOUT_NAME) else its.st_ino)


def why_no_descriptor() -> str:
    """Sentence that refuses an engine because this process had no descriptor to receive
    its pidfd.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"the node has used up its {limit} descriptors: raise LimitNOFILE, or ulimit -n"
