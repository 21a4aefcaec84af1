"""The supervisor with node processes that do as a test says: deaths, upgrades, what is kept."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.errors import AttachError, ConfigError
from kvstore.supervisor import sockets
from kvstore.supervisor.sockets import UpgradeRefused, ask_for_upgrade, refuse_what_is_not_ours
from kvstore.testing.process import children_of, stop_process

SCRIPT = Path(__file__).with_name("scripted_process.py")
SUPERVISE = """
import sys
from kvstore.obs import logs
from kvstore.net.process import spawn
from kvstore.supervisor import child, supervisor
from kvstore.supervisor.control import BeginServing
directory, script, pace = sys.argv[1:]
logs.setup("info")
child.PAUSES_NS = child.REFUSAL_PAUSES_NS = (0,)
if "quick" in pace:
    supervisor.START_LIMIT_NS, supervisor.LOOK_NS = 5 * 10**9, 5 * 10**7
supervisor.ANSWER_LIMIT_NS = 2 * 10**9
if "patient" in pace:
    supervisor.START_LIMIT_NS, supervisor.LOOK_NS = 10**15, 5 * 10**7
supervisor.STANDBY_AFTER_NS = int(1e12) if "standby" not in pace else 0
start = supervisor.Start(
    BeginServing({}, 1, ""), socket=f"{directory}/node.sock", others_may_connect=False,
    log_level="info",
)
made = supervisor.Supervisor(start, spawn=lambda: spawn((script, directory)))
sys.exit(made.run())
"""
"""The real one, with times that a test can wait for."""


class Supervised:
    """A supervisor of scripted processes."""

    def __init__(self, directory: Path, plan: str, pace: str) -> None:
        self.directory = directory
        self.plan(plan)
        self.layout(1)
        # Appended to: the place of whoever reads is that of whoever writes, too.
        self.log = (directory / "log").open("a+")
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISE, str(directory), str(SCRIPT), pace],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def plan(self, words: str) -> None:
        (self.directory / "plan").write_text(words)

    def layout(self, number: int) -> None:
        (self.directory / "layout").write_text(str(number))

    def serves(self) -> str:
        """Wait for the next process to serve; empty when there is none any more."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    @property
    def socket(self) -> Path:
        return self.directory / "node.sock"

    @property
    def child(self) -> int:
        return children_of(self.process.pid)[0]

    def lives(self) -> list[str]:
        return (self.directory / "lives").read_text().splitlines()

    def told(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def waits_for(self, words: str, *, times: int) -> None:
        """Until the log has these words so often."""
        deadline_s = time.monotonic() + 60
        while self.told().count(words) < times:
            assert time.monotonic() < deadline_s, self.told()
            assert self.process.poll() is None, self.told()
            threading.Event().wait(0.02)

    def waits_for_standby(self) -> int:
        """Until there is one beside the process that serves; its pid."""
        deadline_s = time.monotonic() + 60
        while len(pids := children_of(self.process.pid)) < 2:
            assert time.monotonic() < deadline_s, self.told()
            threading.Event().wait(0.02)
        return pids[-1]

    def waits_until_prepared(self, *, times: int) -> None:
        """Until so many processes have said that their code is loaded."""
        deadline_s = time.monotonic() + 60
        while len((self.directory / "prepared").read_text()) < times:
            assert time.monotonic() < deadline_s, self.told()
            threading.Event().wait(0.02)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(20)


Make = Callable[..., Supervised]


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Make]:
    made: list[Supervised] = []

    def make(plan: str, pace: str = "") -> Supervised:
        made.append(Supervised(tmp_path, plan, pace))
        return made[-1]

    yield make
    for one in made:
        with contextlib.suppress(ProcessLookupError):
            one.process.terminate()
        one.process.communicate(timeout=20)
        one.log.close()


def test_the_next_process_is_given_what_the_last_one_left(supervise: Make) -> None:
    one = supervise("serve")
    assert one.serves() == "0 serves"
    for _ in range(2):
        os.kill(one.child, signal.SIGKILL)
        one.serves()
    assert one.lives() == [
        "0 - [] serve",
        "1 arena,journal [1] serve",
        "2 arena,journal [1, 11] serve",
    ]
    assert one.stop() == 0
    assert "ended with SIGKILL: another is started" in one.told()
    left = sorted(path.name for path in one.directory.iterdir())
    assert left == ["layout", "lives", "log", "plan", "prepared"], "no socket, no lock"


def test_killed_itself_it_leaves_no_process(supervise: Make) -> None:
    one = supervise("serve", "standby")
    one.serves()
    pidfds = [os.pidfd_open(pid) for pid in children_of(one.process.pid)]
    one.process.kill()
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], 20)[0]
        os.close(pidfd)


def test_a_wrong_configuration_is_told_once(supervise: Make) -> None:
    one = supervise("wrong")
    assert one.process.wait(20) == 2
    assert one.told() == "kvstore: a flag is wrong\n"
    assert one.lives() == ["0 - [] wrong"]


def test_a_process_that_dies_again_and_again_is_given_up(supervise: Make) -> None:
    one = supervise("crash")
    assert one.process.wait(20) == 70
    assert len(one.lives()) == 9
    assert "the node process ended 8 times soon after its start" in one.told()


def test_memory_that_nobody_can_use_is_let_go(supervise: Make) -> None:
    one = supervise("crash unready unready serve")
    assert [one.serves(), one.serves()] == ["0 serves", "3 serves"]
    assert one.lives()[1:] == [
        "1 arena,journal [1] unready",
        "2 arena,journal [1] unready",
        "3 - [] serve",
    ]
    assert "two processes could not use it" in one.told()


def test_what_a_process_says_that_it_lacks_costs_no_memory(supervise: Make) -> None:
    one = supervise(" ".join(["crash", *["wrong"] * 12, "serve"]))
    assert [one.serves(), one.serves()] == ["0 serves", "1 serves"], "nor does it count"
    assert one.lives()[-1] == "1 arena,journal [1] serve"
    assert "kvstore: a flag is wrong\n" in one.told()
    assert "next attempt in 0 s, with the memory kept" in one.told()


def test_memory_is_lost_once_and_every_process_counts(supervise: Make) -> None:
    """Processes that end before they are given anything are processes before the next one, too."""
    one = supervise("serve")
    one.serves()
    one.layout(-1)
    os.kill(one.child, signal.SIGKILL)
    one.waits_for("exit status 3: another is started", times=4)
    one.layout(1)
    assert one.serves().endswith(" serves")
    assert one.told().count("all that was in memory is lost") == 1
    life = one.lives()[-1].split()
    assert int(life[0]) == one.told().count(": another is started")
    assert life[1] == "-"


def test_a_standby_that_is_killed_is_replaced(supervise: Make) -> None:
    one = supervise("serve", "standby quick")
    one.serves()
    for count in (1, 2, 3):
        standby = one.waits_for_standby()
        os.kill(standby, signal.SIGKILL)
        one.waits_for("standby process ended with SIGKILL: another one is started", times=count)
    one.waits_for_standby()
    assert "does not start" not in one.told()


def test_a_standby_that_does_not_start_is_not_tried_all_the_time(supervise: Make) -> None:
    one = supervise("serve", "standby quick")
    one.serves()
    standby = one.waits_for_standby()
    one.layout(-1)
    os.kill(standby, signal.SIGKILL)
    one.waits_for("the code on disk does not start (exit status 3)", times=1)
    assert one.stop() == 0


def test_a_process_that_never_serves_is_killed(supervise: Make) -> None:
    one = supervise("crash hang serve", "quick")
    assert [one.serves(), one.serves()[1:]] == ["0 serves", " serves"]
    assert "1 arena,journal [1] hang" in one.lives()
    assert "a node process is late and is killed" in one.told()


@pytest.mark.timeout(60)
def test_a_standby_that_does_not_answer_is_replaced_and_costs_nothing(supervise: Make) -> None:
    """However long a process that is new may take."""
    one = supervise("serve", "standby patient")
    one.serves()
    serving = one.child
    standby = one.waits_for_standby()
    one.waits_until_prepared(times=2)
    stop_process(standby)
    os.kill(serving, signal.SIGKILL)
    assert one.serves().endswith(" serves")
    assert "the standby process did not respond: another one is started" in one.told()
    assert one.lives()[-1].split()[1] == "arena,journal"


def test_an_upgrade_is_refused_while_the_disk_hangs(supervise: Make) -> None:
    one = supervise("hanging serve")
    one.serves()
    old = one.child
    with pytest.raises(UpgradeRefused, match=r"disk tier hangs.* nothing was upgraded"):
        ask_for_upgrade(one.socket)
    assert one.child == old


def test_a_heart_that_stands_still_is_ended(supervise: Make) -> None:
    one = supervise("still serve", "quick")
    assert [one.serves(), one.serves()] == ["0 serves", "1 serves"]
    assert "is stuck" in one.told()


def test_a_stopped_process_ends_when_it_is_asked_to(supervise: Make) -> None:
    one = supervise("serve", "quick")
    one.serves()
    stop_process(one.child)
    assert one.stop() == 0, "SIGCONT comes with SIGTERM"


# ── upgrades ─────────────────────────────────────────────────────────────────────────────────────


def test_an_upgrade_tells_what_was_kept(supervise: Make) -> None:
    one = supervise("serve")
    one.serves()
    old = one.child
    told = ask_for_upgrade(one.socket)
    assert told.startswith("kvstore scripted serves: 1 blocks (0 B) were kept in memory;")
    assert one.child != old
    assert one.lives()[1] == "1 arena,journal [1] serve"


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (2, "keeps its journal in layout 2, the memory has layo"),
        (-1, r"does not start \(exit status 3\)"),
    ],
)
def test_code_that_cannot_go_on_is_refused_and_the_old_one_stays(
    supervise: Make, layout: int, why: str
) -> None:
    one = supervise("serve")
    one.serves()
    old = one.child
    one.layout(layout)
    with pytest.raises(UpgradeRefused, match=why):
        ask_for_upgrade(one.socket)
    assert one.child == old
    one.layout(1)
    ask_for_upgrade(one.socket)


def test_another_layout_after_a_crash_begins_with_empty_memory(supervise: Make) -> None:
    one = supervise("serve")
    one.serves()
    one.layout(2)
    os.kill(one.child, signal.SIGKILL)
    one.serves()
    assert one.lives()[1] == "1 - [] serve"


def test_new_code_that_cannot_go_on_is_tried_twice_and_then_begins_empty(supervise: Make) -> None:
    one = supervise("serve unready unready serve")
    one.serves()
    told = ask_for_upgrade(one.socket)
    assert "3 blocks" in told  # its own number: the script counts lives
    assert one.lives()[-1] == "3 - [] serve"


def test_new_code_that_cannot_start_now_is_told_of_and_tried_again(supervise: Make) -> None:
    one = supervise("serve wrong wrong wrong serve")
    one.serves()
    with pytest.raises(UpgradeRefused, match="attempts go on, with the memory kept"):
        ask_for_upgrade(one.socket)
    assert one.serves() == "1 serves"
    assert one.lives()[-1] == "1 arena,journal [1] serve"


def test_a_supervisor_that_is_stopped_is_not_waited_for(
    supervise: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = supervise("serve")
    one.serves()
    old = one.child
    stop_process(one.process.pid)
    monkeypatch.setattr(sockets, "FIRST_WORD_S", 0.1)
    try:
        with pytest.raises(AttachError, match=f"supervisor, process {one.process.pid}, did not"):
            ask_for_upgrade(one.socket)
    finally:
        os.kill(one.process.pid, signal.SIGCONT)
    # It takes those who ask in turn: by this answer it has seen that the first one is gone.
    monkeypatch.setattr(sockets, "FIRST_WORD_S", 60)
    assert "serves: 1 blocks" in ask_for_upgrade(one.socket)
    assert one.child != old
    assert len(one.lives()) == 2, "nobody waited for the first upgrade: it was not done"


def test_what_a_killed_process_left_goes_with_the_supervisor(supervise: Make) -> None:
    one = supervise("serve")
    one.serves()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(one.socket.with_name("node.sock.rpc")))
    assert one.stop() == 0
    assert not one.socket.with_name("node.sock.rpc").exists()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM])
def test_a_socket_of_another_program_is_refused_and_one_that_nobody_has_is_not(
    tmp_path: Path, kind: socket.SocketKind
) -> None:
    path = tmp_path / "theirs"
    with socket.socket(socket.AF_UNIX, kind) as theirs:
        theirs.bind(str(path))
        if kind != socket.SOCK_DGRAM:
            theirs.listen()
        with pytest.raises(ConfigError, match="in use by another program: choose another --x"):
            refuse_what_is_not_ours(path, option="--x")
    refuse_what_is_not_ours(path, option="--x")
