"""NIXL in two processes that do nothing else: what any way of reading from a peer is held against.

    raw = RawNixl(stack, 256 << 20, {"UCX_TLS": "tcp"}, rests=True)
    took_ns = raw.read_ns([make_pieces([0], [0], [256 << 20])])

Each list of pieces is one READ, or WRITE; all are posted at once, then looked at until all are
done. What NIXL needs to be told of them is timed, too. Memory is of the same kind as an arena, and
touched.
Between reads both are stopped: where their progress threads do not rest, they take a core each even
when there is nothing to do. Ends with the stack, or with the process that made it.
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
from typing import Final

from kvstore.ports import Pieces
from kvstore.testing.process import read_line

ANSWER_S: Final = 60.0
_DEATH_SIGNAL: Final = 1
_PROGRAM: Final = f"""if True:
    import ctypes
    ctypes.CDLL(None).prctl({_DEATH_SIGNAL}, 9)
    import contextlib, json, mmap, os, select, sys, time
    import nixl_cu13._api as api
    import numpy as np
    from kvstore.transport.nixl import sleeping_progress
    size, role, rests = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
    with sleeping_progress(api.nixlBind) if rests else contextlib.nullcontext():
        agent = api.nixl_agent(role, api.nixl_agent_config(backends=["UCX"]))
    fd = os.memfd_create("raw")
    os.ftruncate(fd, size)
    memory = np.frombuffer(mmap.mmap(fd, size), np.uint8)
    memory[:] = role == "owner"
    agent.register_memory([(memory.ctypes.data, size, 0, "")], "DRAM")
    if role == "owner":
        print(memory.ctypes.data, agent.get_agent_metadata().hex(), flush=True)
        input()
        sys.exit()
    base, metadata = input().split()
    name = agent.add_remote_agent(bytes.fromhex(metadata))
    print("ready", flush=True)
    for line in sys.stdin:
        look_s, kind, asked = json.loads(line)
        reads = [np.array(each, np.uint64) for each in asked]
        begin = time.perf_counter_ns()
        handles = []
        for local, remote, length in reads:
            lists = []
            for start, at in ((memory.ctypes.data, local), (int(base), remote)):
                rows = np.zeros((len(at), 3), np.uint64)
                rows[:, 0], rows[:, 1] = at + np.uint64(start), length
                lists.append(agent.get_xfer_descs(rows, "DRAM"))
            handles.append(agent.initialize_xfer(kind, *lists, name))
        states = [agent.transfer(each) for each in handles]
        while "PROC" in states:
            if look_s:
                select.select([], [], [], look_s)
            states = [
                agent.check_xfer_state(each) if state == "PROC" else state
                for each, state in zip(handles, states)
            ]
        took = time.perf_counter_ns() - begin
        assert set(states) == {{"DONE"}}, states
        for local, _, length in reads if kind == "READ" else ():
            for at, count in zip(local.tolist(), length.tolist()):
                assert memory[at] and memory[at + count - 1], "it did not come"
                memory[at : at + count] = 0
        print(took, flush=True)
        for each in handles:
            each.release()
"""


class RawFailed(Exception):
    """Raw NIXL did not read what it was asked to."""


def is_installed() -> bool:
    return importlib.util.find_spec("nixl_cu13") is not None


class RawNixl:
    """An owner and a reader of so many bytes each."""

    def __init__(
        self, stack: ExitStack, size_bytes: int, environment: Mapping[str, str], *, rests: bool
    ) -> None:
        """`rests`: progress threads sleep while there is nothing to do, as those of transfer
        workers; NIXL's own way is that they do not."""
        self._environment = {**os.environ, **environment}
        self._rests = rests
        self._processes: list[subprocess.Popen[str]] = []
        reader = self._start(stack, "reader", size_bytes)
        owner = self._start(stack, "owner", size_bytes)
        self._reader = reader
        self._say(_line(owner))
        if _line(reader) != "ready\n":
            raise RawFailed("raw NIXL did not start")
        self._signal(signal.SIGSTOP)

    def read_ns(self, reads: Sequence[Pieces], *, look_s: float = 0.0, kind: str = "READ") -> int:
        """`look_s`: between two looks; 0: without a pause. `kind`: or WRITE. Raises RawFailed."""
        asked = [[part.tolist() for part in pieces] for pieces in reads]
        self._signal(signal.SIGCONT)
        try:
            self._say(json.dumps([look_s, kind, asked]) + "\n")
            return int(_line(self._reader))
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, which: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(which)

    def _say(self, line: str) -> None:
        assert self._reader.stdin is not None
        self._reader.stdin.write(line)
        self._reader.stdin.flush()

    def _start(self, stack: ExitStack, role: str, size_bytes: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(size_bytes), role, str(self._rests)],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        self._processes.append(process)
        return process


def _line(process: subprocess.Popen[str]) -> str:
    """What it says next."""
    line = read_line(process, ANSWER_S)
    if not line:
        raise RawFailed("raw NIXL did not answer")
    return line
