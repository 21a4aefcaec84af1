"""A node process that does what a test wants: `python scripted_process.py DIRECTORY FD PARENT`.

DIRECTORY/plan     what each process does, one word a line; the last goes on for all later ones
DIRECTORY/layout   of the journal, as this code has it
DIRECTORY/prepared is written here: a dot for each process that waits for its turn
DIRECTORY/lives    is written here: life, what was held, the writers, what it did
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
from pathlib import Path

from kvstore.net.process import die_with
from kvstore.supervisor import control

PAGE = 8192


def main(directory: Path, sock: socket.socket) -> int:
    layout = int((directory / "layout").read_text())
    if layout < 0:
        return 3
    control.send(sock, control.Prepared(control.CONTROL_VERSION, layout, "scripted"))
    with (directory / "prepared").open("a") as file:
        file.write(".")
    held, writers = [], []
    while True:
        heard = control.receive(sock, control.from_supervisor)
        if heard is None:
            return 1
        match heard[0]:
            case control.Held(name=name):
                held.append(name)
            case control.RegisteredWriter(number=number):
                writers.append(number)
            case control.BeginServing(life=life):
                break
    control.send(sock, control.Begun())
    words = (directory / "plan").read_text().split()
    with (directory / "lives").open("a+") as file:
        file.seek(0)
        word = words[min(len(file.readlines()), len(words) - 1)]
        file.write(f"{life} {','.join(sorted(held)) or '-'} {writers} {word}\n")
    return act(word, sock, life, held)


def act(word: str, sock: socket.socket, life: int, held: list[str]) -> int:
    if word == "unready":
        return 1
    if word == "wrong":
        sys.stderr.write("kvstore: a flag is wrong\n")
        return 2
    if word == "hang":
        signal.pause()
    page = os.memfd_create("page")
    os.ftruncate(page, PAGE)
    os.pwrite(page, bytes([life + 1]) * 8, 4096)
    control.send(sock, control.GenerationPage(), page)
    control.receive(sock, control.from_supervisor)
    for name in ("arena", "journal"):
        if name not in held:
            control.send(sock, control.Keep(name), page)
    pidfd = os.pidfd_open(os.getppid())
    control.send(sock, control.Attached(10 * life, b"hello"), pidfd)
    control.send(sock, control.Attached(10 * life + 1, b"hello"), pidfd)
    control.send(sock, control.Released(10 * life))
    if word == "hanging":
        control.send(sock, control.DiskHangs(hangs=True))
    control.send(sock, control.Serving(control.Addresses(), blocks=life, size_bytes=0))
    sys.stdout.write(f"{life} serves\n")
    sys.stdout.flush()
    if word == "crash":
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with mmap.mmap(page, PAGE) as memory:
        while True:
            if word != "still":  # its heart beats, that of "still" does not
                memory[24:32] = os.urandom(8)
            signal.sigtimedwait((), 0.02)


if __name__ == "__main__":
    die_with(int(sys.argv[3]))
    sys.exit(main(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))))
