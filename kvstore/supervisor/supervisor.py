"""The supervisor: holds the memory of a node, and starts another node process when one ends.

    kvstore node ─exec─▶ supervisor ── holds arena, journal, pidfds, the attach socket
                             ├── node process: everything else (`process`, `handover`, `node`)
             └── standby: a node process that has loaded its code and waits

The supervisor has no layout and touches no block. Descriptors come from a node process and go to
the next. Before that one may reuse a slot, the generation page of the previous one is made void, so
that readers still under it drop their copies; no other process could do that.

Signals are sent to the supervisor, and its exit status is the node's. The node ends with it: in
good order on a signal, at once when it is killed. Few imports: it lives as long as the memory.

Loading the code takes longer than the rest of a restart, so a standby has done it ahead of need.
The standby has the code of its start: an upgrade puts a new one in its place, which takes over.

Covers: begin and end of processes, descriptors, upgrades; settings of the command line passed on,
and the exec that makes its process the supervisor. Does not cover: one process, what is kept of it,
and limits of restarts (`child`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec

from kvstore.errors import ConfigError
from kvstore.net.process import Spawned, harden_process
from kvstore.obs import logs
from kvstore.supervisor import control
from kvstore.supervisor.child import DEATHS_MAX, Kept, Process, Restarts, spawn_process, told
from kvstore.supervisor.sockets import Listener, UpgradeDoor
from kvstore.units import NS_PER_S, format_size

if TYPE_CHECKING:
    from kvstore.config.node import NodeConfig

EXIT_GAVE_UP: Final = 70
"""EX_SOFTWARE: a bug of ours; a pod or unit may start the node again."""
STOP_LIMIT_NS: Final = 12 * NS_PER_S
"""Limit of an orderly end, disk tier included."""
START_LIMIT_NS: Final = 60 * NS_PER_S
"""Limit of a start, for a later process until it serves; the first one has none."""
ANSWER_LIMIT_NS: Final = 5 * NS_PER_S
"""Limit for a standby's answer, from its turn to its `Begun`."""
STANDBY_AFTER_NS: Final = 2 * NS_PER_S
"""Service of a process before its standby is loaded: a start has better things to do."""
LOOK_NS: Final = NS_PER_S
STILL_LOOKS_MAX: Final = 10
"""Looks at an unchanged heartbeat after which the process is killed. Looks, not seconds: there are
none while the machine is suspended, or this process is stopped with its node."""

HANGS: Final = (
    "the disk tier hangs, and a process that waits for it cannot be ended: nothing was upgraded;"
    " retry when /healthz says ok"
)
_log = logging.getLogger("kvstore.supervisor.supervisor")


class Start(msgspec.Struct, frozen=True):
    """Settings from the command line: checked already."""

    begin: control.BeginServing
    """Message that begins the service of the first node process."""
    socket: str
    others_may_connect: bool
    log_level: str
    drain_s: int = 0


class Supervisor:
    """One node, until `run` returns its exit status."""

    def __init__(self, start: Start, *, spawn: Callable[[], Spawned] = spawn_process) -> None:
        """Make the sockets.

        Raises:
            ConfigError: they cannot be made.
        """
        self._start, self._spawn = start, spawn
        self._selector = selectors.DefaultSelector()
        self._store = Kept()
        self._restarts, self._standby_restarts = Restarts(), Restarts()
        self._processes: set[Process] = set()
        """All living ones."""
        self._process: Process | None = None
        self._standby: Process | None = None
        """The process that takes over when `_process` has ended; None: there is none yet."""
        self._upgrading = False
        self._begin_at_ns = 0
        """Time to begin another process; 0: not now."""
        self._standby_at_ns = 0
        self._places = control.Addresses()
        self._life = 0
        self._died_ns = 0
        self._has_served = self._holds_blocks = False
        self._stopping = self._is_urgent = False
        self._exit_code: int | None = None
        self._look_ns, self._beat, self._still = 0, b"", 0
        self._beat_ns = 0
        """Time of the last look at which the heartbeat had changed."""
        self._listener = Listener(Path(start.socket), others_may_connect=start.others_may_connect)
        try:
            self._door = UpgradeDoor(Path(start.socket), self._upgrade)
        except ConfigError:
            self._listener.close()
            raise
        self._door.listen(self._selector)

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────

    def run(self) -> int:
        """Serve until a signal or the node's end; returns the exit status."""
        waker, woken = socket.socketpair()
        for end in (waker, woken):
            end.setblocking(False)
        self._selector.register(woken, selectors.EVENT_READ, lambda: woken.recv(64))
        old = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        handlers = {
            number: signal.signal(number, lambda number, _: self.stop(number))
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }
        try:
            self._begin_process()
            while self._exit_code is None:
                for key, _ in self._selector.select(self._wait_s()):
                    key.data()
                self._time_passes(time.monotonic_ns())
            return self._exit_code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(old)
            waker.close()
            woken.close()
            self._close()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End the node in good order, then the supervisor: after a drain on the first SIGTERM, at
        once on the second or another signal. Safe in a signal handler."""
        self._is_urgent = self._stopping or number != signal.SIGTERM
        self._stopping = True

    def _close(self) -> None:
        for process in self._processes:
            process.close()
        self._store.close()
        self._door.close()
        self._listener.close()
        self._selector.close()

    def _wait_s(self) -> float:
        now_ns = time.monotonic_ns()
        times = [self._look_ns + LOOK_NS, self._begin_at_ns]
        times += [process.deadline_ns for process in self._processes]
        return max(0.0, (min(filter(None, times)) - now_ns) / NS_PER_S)

    def _time_passes(self, now_ns: int) -> None:
        if self._stopping and self._process is not None:
            self._end_process(self._process, now_ns, 0 if self._is_urgent else self._start.drain_s)
        elif self._stopping:
            self._exit_code = self._exit_code or 0
        elif self._begin_at_ns and now_ns >= self._begin_at_ns:
            self._begin_at_ns = 0
            self._begin_process()
        for process in self._processes:
            if process.deadline_ns and now_ns >= process.deadline_ns:
                _log.error("a node process is late and is killed")
                process.deadline_ns = 0
                process.kill()
        if now_ns - self._look_ns >= LOOK_NS:
            self._look(now_ns)
            self._door.listen(self._selector)
            if self._serves and self._standby is None and now_ns >= self._standby_at_ns:
                self._standby = self._new_process()
                self._standby_at_ns = now_ns + START_LIMIT_NS

    def _look(self, now_ns: int) -> None:
        """Look at the node's heartbeat, and kill a process whose heartbeat stands still. A late
        look does not count: this process was stopped itself."""
        beat, in_time = self._store.heartbeat(), now_ns - self._look_ns < 3 * LOOK_NS
        stands = beat == self._beat and in_time
        self._still = self._still + 1 if stands else 0
        if beat != self._beat:
            self._beat_ns = now_ns
        self._look_ns, self._beat = now_ns, beat
        process = self._process
        if process is not None and process.asked_to_end and not process.was_killed:
            self._still = 0  # its heart may stand still: it has a deadline, without a drain then
            if stands and now_ns - self._beat_ns >= STILL_LOOKS_MAX * LOOK_NS:
                process.deadline_ns = min(process.deadline_ns, now_ns + STOP_LIMIT_NS)
        if self._still < STILL_LOOKS_MAX or process is None or not self._serves:
            return
        self._still = 0
        if not process.was_killed:
            _log.error("the node's loop is stuck for %d s: process killed", STILL_LOOKS_MAX)
            process.kill()
        elif not process.hangs_told:
            process.hangs_told = True
            _log.error(
                "process %d was killed and does not end: it hangs in the kernel, most likely in"
                " I/O of the disk tier; another begins when it is gone",
                process.pid,
            )

    def _end_process(self, process: Process, now_ns: int, drain_s: int = 0) -> None:
        """Send a signal once: SIGTERM, on which a node that can drain does, or SIGHUP, also when it
        drains already. A process that takes too long is killed."""
        number = signal.SIGHUP if self._start.drain_s and not drain_s else signal.SIGTERM
        if process.asked_to_end not in (number, signal.SIGHUP):  # what is urgent stays urgent
            process.asked_to_end = number
            process.deadline_ns = now_ns + STOP_LIMIT_NS + drain_s * NS_PER_S
            process.signal(number)
            process.signal(signal.SIGCONT)  # a stopped one would not see it

    # ── processes ────────────────────────────────────────────────────────────────────────────────

    @property
    def _serves(self) -> bool:
        return self._process is not None and self._process.serving_since_ns != 0

    def _new_process(self) -> Process | None:
        """Start a node process, and watch it; None: the machine has no room for it."""
        try:
            process = Process(self._spawn())
        except OSError as error:
            _log.error("no node process can be started: %s", error.strerror)
            return None
        self._processes.add(process)
        self._selector.register(process.pidfd, selectors.EVENT_READ, lambda: self._ended(process))
        self._selector.register(process.socket, selectors.EVENT_READ, lambda: self._hear(process))
        return process

    def _begin_process(self) -> None:
        """Make the standby, or a new process, the node's process."""
        process, self._standby = self._standby or self._new_process(), None
        self._process = process
        if process is None:
            self._begin_at_ns = time.monotonic_ns() + NS_PER_S
            return
        if self._has_served:
            stood_by = process.prepared is not None
            limit_ns = ANSWER_LIMIT_NS if stood_by else START_LIMIT_NS
            process.deadline_ns = time.monotonic_ns() + limit_ns
        if process.prepared is not None:
            self._hand_over(process)

    def _hear(self, process: Process) -> None:
        """Receive all its messages."""
        while process in self._processes:
            try:
                heard = control.receive(
                    process.socket, control.from_node, flags=socket.MSG_DONTWAIT
                )
            except (BlockingIOError, TimeoutError):
                return
            except (OSError, msgspec.DecodeError) as error:
                lost = error.message if isinstance(error, control.DescriptorLost) else None
                if isinstance(lost, control.Attached):  # the pidfd of a rank
                    self._holds_blocks = False
                    self._store.cannot_keep_a_writer()
                    continue
                heard = None
                process.signal(signal.SIGKILL)
            if heard is None:  # its pidfd fires next
                with contextlib.suppress(KeyError):
                    self._selector.unregister(process.socket)
                return
            self._take(process, *heard)

    def _take(self, process: Process, message: control.FromNode, fd: int) -> None:
        store = self._store
        match message:
            case control.Attached(number=number, hello=hello):
                store.attached(number, hello, fd)
            case control.Begun():
                process.has_begun = True
                if process.deadline_ns and not process.asked_to_end:
                    process.deadline_ns = time.monotonic_ns() + START_LIMIT_NS
            case control.DiskHangs(hangs=hangs):
                process.disk_hangs = hangs
            case control.Released(number=number):
                store.released(number)
            case control.GenerationPage():
                try:
                    store.take_page(fd)
                except OSError as error:
                    _log.error(
                        "no room for the node's generation page, process killed: %s", error.strerror
                    )
                    process.signal(signal.SIGKILL)
                else:
                    self._say(process, control.PageTaken())
            case control.Keep(name=name):
                store.hold(name, fd)
                assert process.prepared is not None
                store.layout = process.prepared.layout
            case control.DropKept():
                self._lose("")
            case control.Serving():
                self._is_serving(process, message)
            case control.Prepared():
                process.prepared = message
                if process is self._process:
                    self._hand_over(process)
                elif process is self._standby and self._upgrading:
                    self._new_code_is_loaded(process, message)

    def _say(self, process: Process, message: control.Control, fd: int | None = None) -> None:
        """Send a message that the process waits for. A process that does not read is killed."""
        try:
            control.send(process.socket, message, fd)
        except OSError:
            process.signal(signal.SIGKILL)

    def _hand_over(self, process: Process) -> None:
        assert process.prepared is not None
        store = self._store
        objection = self._objection(process.prepared)
        if process.prepared.control != control.CONTROL_VERSION:
            _log.error("%s", objection)
            process.signal(signal.SIGKILL)
            return
        if objection:
            self._lose(objection)
        for name, fd in (store.memory | store.places).items():
            self._say(process, control.Held(name), fd)
        for number, (hello, pidfd) in store.writers.items():
            self._say(process, control.RegisteredWriter(number, hello), pidfd)
        begin = msgspec.structs.replace(
            self._start.begin, life=self._life, died_ns=self._died_ns, places=self._places
        )
        self._say(process, begin, self._listener.socket.fileno())

    def _objection(self, prepared: control.Prepared) -> str:
        """Why this code cannot go on with the memory held; empty when it can."""
        if prepared.control != control.CONTROL_VERSION:
            return "the code on disk cannot serve under this supervisor: restart the whole node"
        if self._store.memory and prepared.layout != self._store.layout:
            return (
                f"kvstore {prepared.version} keeps its journal in layout {prepared.layout}, the"
                f" memory has layout {self._store.layout}: restart the whole node to use it"
            )
        return ""

    def _is_serving(self, process: Process, message: control.Serving) -> None:
        self._beat_ns = process.serving_since_ns = time.monotonic_ns()
        if not process.asked_to_end:
            process.deadline_ns = 0
        self._standby_at_ns = process.serving_since_ns + STANDBY_AFTER_NS
        self._places, self._has_served, self._still = message.places, True, 0
        self._upgrading, self._holds_blocks = False, True
        assert process.prepared is not None
        if self._died_ns:
            away_s = (process.serving_since_ns - self._died_ns) / NS_PER_S
            self._door.answer(
                f"kvstore {process.prepared.version} serves: {message.blocks} blocks"
                f" ({format_size(message.size_bytes)}) were kept in memory; service was interrupted"
                f" for {away_s:.2f} s",
                done=True,
            )

    def _ended(self, process: Process) -> None:
        """A process is gone; its messages before that count."""
        self._hear(process)
        for source in (process.pidfd, process.socket):
            with contextlib.suppress(KeyError):
                self._selector.unregister(source)
        status, now_ns = process.close(), time.monotonic_ns()
        self._processes.remove(process)
        if process is self._standby:
            self._standby_ended(process, status, now_ns)
        elif process is self._process:
            self._process_ended(process, status, now_ns)

    def _standby_ended(self, process: Process, status: int, now_ns: int) -> None:
        self._standby, self._standby_at_ns = None, now_ns + START_LIMIT_NS
        if status >= 0:  # a signal says nothing of the code
            _log.warning("the code on disk does not start (%s)", told(status))
            self._refuse(f"the code on disk does not start ({told(status)}): see the log")
            return
        again = self._standby_restarts.ended(served_ns=now_ns - process.began_ns)
        if again is not None:
            self._standby_at_ns = now_ns + again.pause_ns
        _log.warning("the standby process ended with %s: another one is started", told(status))
        self._refuse(f"the new process ended with {told(status)} before it served: see the log")

    def _process_ended(self, process: Process, status: int, now_ns: int) -> None:
        self._process = None
        self._life += process.was_a_life(status)
        if process.serving_since_ns:
            # One that the kernel held on to stopped serving before it was gone.
            self._died_ns = self._beat_ns if now_ns - self._beat_ns > 3 * LOOK_NS else now_ns
        if process.asked_to_end:
            _log.info("stopped" if self._stopping else "replaced by the code that is installed now")
        if self._stopping:
            self._exit_code = 0 if status in (0, -signal.SIGTERM, -signal.SIGHUP) else EXIT_GAVE_UP
        elif not self._has_served:
            # A wrong configuration, most likely, and it has said so.
            self._exit_code = status if status > 0 else EXIT_GAVE_UP
            if status < 0:
                sys.stderr.write(f"kvstore: the node process ended with {told(status)}\n")
        elif process.asked_to_end and self._standby is not None:
            self._begin_process()
        else:
            self._start_again(process, status, now_ns)

    def _start_again(self, process: Process, status: int, now_ns: int) -> None:
        if process.is_mute:
            _log.error("the standby process did not respond: another one is started")
            self._begin_at_ns = now_ns
            return
        served_ns = now_ns - process.serving_since_ns if process.serving_since_ns else 0
        if status == control.EXIT_REFUSED and not served_ns and self._store.memory:
            pause_ns = self._restarts.refused().pause_ns
            _log.error(
                "the node process cannot start, for the reason above: next attempt in %d s, with"
                " the memory kept",
                pause_ns // NS_PER_S,
            )
            self._refuse(
                "the new code cannot start, and the log says why: attempts go on, with the memory"
                " kept; requests are computed meanwhile"
            )
            self._begin_at_ns = now_ns + pause_ns
            return
        again = self._restarts.ended(served_ns=served_ns)
        if again is None:
            soon = f"ended {DEATHS_MAX} times soon after its start, the last time with"
            sys.stderr.write(f"kvstore: the node process {soon} {told(status)}: see above\n")
            self._refuse("the node process keeps crashing: the node gives up")
            self._exit_code = EXIT_GAVE_UP
            return
        _log.warning("the node process ended with %s: another is started", told(status))
        if not again.keep:
            self._lose("two processes could not use it")
        self._begin_at_ns = now_ns + again.pause_ns

    def _lose(self, why: str) -> None:
        """Drop memory; log it if a process served from it and has not logged it itself (empty)."""
        if self._holds_blocks and why:
            _log.error("all that was in memory is lost: %s", why)
        self._holds_blocks = False
        self._store.forget()  # the old page becomes void with the next one

    # ── upgrades ─────────────────────────────────────────────────────────────────────────────────

    def _upgrade(self) -> None:
        """Handle a request for the code on disk, which is loaded beside the old one first."""
        if not self._serves or self._stopping:
            what = "ending" if self._stopping else "restarting"
            self._refuse(f"the node is {what}: retry when it serves")
            return
        assert self._process is not None
        if self._process.disk_hangs:
            self._refuse(HANGS)
            return
        if self._standby is not None:
            self._standby.signal(signal.SIGKILL)
        self._upgrading = True
        self._standby = self._new_process()
        if self._standby is None:
            self._refuse("no other process can be started: see the log")
        else:
            self._standby.deadline_ns = time.monotonic_ns() + START_LIMIT_NS

    def _refuse(self, why: str) -> None:
        self._upgrading = False
        self._door.answer(why, done=False)

    def _new_code_is_loaded(self, process: Process, prepared: control.Prepared) -> None:
        objection = self._objection(prepared)
        if self._process is not None and self._process.disk_hangs:
            objection = HANGS
        if self._stopping:
            objection = "the node is ending"
        if objection:
            self._refuse(objection)
            process.signal(signal.SIGKILL)
        elif self._process is not None:
            self._end_process(self._process, time.monotonic_ns())


# ── from the command line ────────────────────────────────────────────────────────────────────────


def start_of(config: NodeConfig, settings: dict[str, Any]) -> Start:
    """Input of a supervisor."""
    return Start(
        control.BeginServing(settings, config.dram_bytes, config.dram_note),
        socket=str(config.socket),
        others_may_connect=bool(config.allow_uid - {0, os.geteuid()}),
        log_level=config.log_level,
        drain_s=config.drain_s,
    )


def supervise(config: NodeConfig, settings: dict[str, Any]) -> NoReturn:
    """Become the supervisor of a node: a process with few of the modules loaded here."""
    fd = os.memfd_create("kvstore-start", 0)
    os.write(fd, msgspec.json.encode(start_of(config, settings)))
    os.lseek(fd, 0, os.SEEK_SET)
    # The command line follows, for readers of a process list.
    command = ["-P", "-m", "kvstore.supervisor.supervisor", str(fd), *sys.argv[1:]]
    sys.stdout.flush()
    try:
        os.execv(sys.executable, [sys.executable, *command])  # noqa: S606
    except OSError as error:
        raise ConfigError(f"{sys.executable} cannot be run: {error.strerror}") from None


def main(arguments: list[str]) -> int:
    """`arguments`: number of the descriptor with a `Start`; the rest is for a process list."""
    with os.fdopen(int(arguments[0]), "rb") as file:
        start = msgspec.json.decode(file.read(), type=Start)
    harden_process()
    logs.setup(start.log_level)
    try:
        return Supervisor(start).run()
    except ConfigError as error:
        sys.stderr.write(f"kvstore: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
