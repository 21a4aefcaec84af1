"""Child processes that end with this one, in any way: SIGKILL leaves no time to clean up.

Nothing of ours can run between a fork and an exec, so a few lines of Python run first: they ask the
kernel for SIGKILL at the end of their parent (PR_SET_PDEATHSIG), check that it still lives, and
become the command. Processes of a node or an index end with their supervisor in turn.

The kernel means the *thread* that made the child, so all are made by one thread that lasts.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

BECOME: Final = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(137)
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Program that becomes the command in its arguments, after the parent's pid."""
_T = TypeVar("_T")


def popen(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """`subprocess.Popen`, of a child that ends with this process."""
    # Without site-packages it starts in a hundredth of a second.
    tied = [sys.executable, "-I", "-S", "-c", BECOME, str(os.getpid()), *command]
    return on_lasting_thread(lambda: subprocess.Popen(tied, **options))


def on_lasting_thread(call: Callable[[], _T]) -> _T:
    """Call a function on a thread that ends only with this process. Returns its result."""
    return _threads(os.getpid()).submit(call).result()


@functools.cache
def _threads(_pid: int) -> ThreadPoolExecutor:
    """The pool with that thread, by process: a forked child has no threads of its parent."""
    return ThreadPoolExecutor(1, thread_name_prefix="nursery")
