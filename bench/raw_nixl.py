"""NIXL in two processes that do nothing else: what any way of reading from a peer is held against.

    raw = RawNixl(stack, 256 << 20, {"UCX_TLS": "tcp"})
    took_ns = raw.read_ns([make_pieces([0], [0], [256 << 20])])

Each list of pieces is one READ; all are posted at once, then looked at until all are done. What
NIXL needs to be told of them is timed, too. Between reads both are stopped: their progress threads
take a core each, even when there is nothing to do. Ends with the stack.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import IO, Final

from kvstore.ports import Pieces

_PROGRAM: Final = """if True:
    import json, select, sys, time
    import nixl_cu13._api as api
    import numpy as np
    size, role = int(sys.argv[1]), sys.argv[2]
    agent = api.nixl_agent(role, api.nixl_agent_config(backends=["UCX"]))
    memory = np.ones(size, np.uint8)
    agent.register_memory([(memory.ctypes.data, size, 0, "")], "DRAM")
    if role == "owner":
        print(memory.ctypes.data, agent.get_agent_metadata().hex(), flush=True)
        input()
        sys.exit()
    base, metadata = input().split()
    name = agent.add_remote_agent(bytes.fromhex(metadata))
    print("ready", flush=True)
    for line in sys.stdin:
        look_s, asked = json.loads(line)
        reads = [np.array(each, np.uint64) for each in asked]
        begin = time.perf_counter_ns()
        handles = []
        for local, remote, length in reads:
            lists = []
            for start, at in ((memory.ctypes.data, local), (int(base), remote)):
                rows = np.zeros((len(at), 3), np.uint64)
                rows[:, 0], rows[:, 1] = at + np.uint64(start), length
                lists.append(agent.get_xfer_descs(rows, "DRAM"))
            handles.append(agent.initialize_xfer("READ", *lists, name))
        left = [each for each in handles if agent.transfer(each) == "PROC"]
        while left:
            if look_s:
                select.select([], [], [], look_s)
            left = [each for each in left if agent.check_xfer_state(each) == "PROC"]
        print(time.perf_counter_ns() - begin, flush=True)
        for each in handles:
            each.release()
"""


def is_installed() -> bool:
    return importlib.util.find_spec("nixl_cu13") is not None


class RawNixl:
    """An owner and a reader of so many bytes each."""

    def __init__(self, stack: ExitStack, size_bytes: int, environment: Mapping[str, str]) -> None:
        self._environment = {**os.environ, **environment}
        self._processes: list[subprocess.Popen[str]] = []
        self._in, self._out = self._start(stack, "reader", size_bytes)
        _, told = self._start(stack, "owner", size_bytes)
        self._say(told.readline())
        ready = self._out.readline()
        assert ready == "ready\n", ready
        self._signal(signal.SIGSTOP)

    def read_ns(self, reads: Sequence[Pieces], *, look_s: float = 0.0) -> int:
        """`look_s`: between two looks; 0: without a pause."""
        asked = [[part.tolist() for part in pieces] for pieces in reads]
        self._signal(signal.SIGCONT)
        try:
            self._say(json.dumps([look_s, asked]) + "\n")
            return int(self._out.readline())
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, which: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(which)

    def _say(self, line: str) -> None:
        self._in.write(line)
        self._in.flush()

    def _start(self, stack: ExitStack, role: str, size_bytes: int) -> tuple[IO[str], IO[str]]:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(size_bytes), role],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        self._processes.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        return process.stdin, process.stdout
