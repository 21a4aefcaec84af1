"""Images built by buildah on a base of debootstrap, and run as a container with a read-only root.

    with Storage(tmp_path) as storage:
        image = storage.build("node")
        with Container.start(storage.root(image), image, args, volumes, log) as node:
            urllib.request.urlopen(node.metrics_url)

A container here is a process with a mount and a PID namespace of its own, the user, variables and
command of the image's configuration, no capability, and no way to write but to its volumes, /tmp,
and a /dev/shm of 64 MiB, Docker's default. Does not cover: cgroups, seccomp, a network namespace.

The base is made once, in `build/images` or the folder that KVSTORE_IMAGES names.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import psutil

from kvstore.testing.process import ChildServer, NodeFailed, popen_tied, read_line, reap
from scripts.chart import ROOT

RECIPE: Final = ROOT / "deploy" / "images" / "Dockerfile"
CACHE: Final = Path(os.environ.get("KVSTORE_IMAGES") or ROOT / "build" / "images")
PACKAGES: Final = "ca-certificates,netbase,tzdata,python3,python3-venv,python-is-python3"
"""What the base of the recipe has beyond a minimal Debian; its Python is one of its own."""
BASE: Final = "localhost/python:base"
SOURCE: Final = "https://sources.example/kvstore"
CERTIFICATES: Final = "/etc/ssl/certs:/etc/ssl/certs:ro"
"""Of this machine, for pip: a proxy may have one of its own."""
READY_S: Final = 180.0
_INSIDE: Final = r"""
set -eu
root=$1 user=$2 group=$3 count=$4
shift 4
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
mount -t tmpfs -o nosuid,nodev,mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o nosuid,mode=755 tmpfs "$root/dev"
mkdir "$root/dev/shm"
mount -t tmpfs -o nosuid,nodev,mode=1777,size=64m tmpfs "$root/dev/shm"
for device in null zero random urandom; do
  touch "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
mount -o remount,ro "$root/dev"
while [ "$count" -gt 0 ]; do
  mount --bind "$1" "$root$2"
  shift 2
  count=$((count - 1))
done
exec chroot "$root" setpriv --reuid "$user" --regid "$group" --clear-groups --bounding-set -all \
  --inh-caps -all --no-new-privs --pdeathsig KILL env -i "$@"
"""


def base() -> Path:
    """A tar of a Debian with the Python of the recipe's base; made when missing, in two minutes."""
    found = CACHE / f"{suite()}.tar"
    if not found.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        made = CACHE / f"{suite()}.{os.getpid()}"
        try:
            command = ("debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite())
            run([*command, str(made / "root")])
            for cache in ("var/cache/apt", "var/lib/apt/lists"):
                shutil.rmtree(made / "root" / cache)
            tar = ("tar", "--numeric-owner", "-C", str(made / "root"), "-cf", str(made / "tar"))
            run([*tar, "."])
            (made / "tar").rename(found)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return found


def suite() -> str:
    """Debian of the recipe's base, such as bookworm."""
    (found,) = re.findall(r"^ARG PYTHON_IMAGE=\S+-slim-(\w+)$", RECIPE.read_text(), re.MULTILINE)
    return str(found)


def run(command: Sequence[str]) -> str:
    """Its output; AssertionError with all that it said when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout.strip()


class Storage:
    """Images and containers of buildah in a folder of their own; all of them end with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._roots: dict[str, tuple[str, Path]] = {}
        self._built: set[str] = set()
        self.digest = ""

    def __enter__(self) -> Self:
        container = self.buildah("from", "scratch")
        self.buildah("add", "--quiet", container, str(base()), "/")
        self.buildah("commit", "--quiet", "--rm", container, BASE)
        told = self.image(BASE)
        self.digest = str(told["FromImageDigest"])
        return self

    def __exit__(self, *_: object) -> None:
        self.buildah("umount", "--all")
        self.buildah("rm", "--all")
        self.buildah("rmi", "--all", "--force")
        shutil.rmtree(self.folder)

    def buildah(self, *arguments: str) -> str:
        """The output of a command."""
        places = ("--root", str(self.folder / "storage"), "--runroot", str(self.folder / "run"))
        return run(["buildah", *places, *arguments])

    def image(self, name: str) -> dict[str, Any]:
        """What an image says of itself."""
        found: dict[str, Any] = json.loads(self.buildah("inspect", "--type", "image", name))
        return found

    def build(self, target: str, *, gpu: int = 0) -> str:
        """The name of the image of a target of the recipe; built the first time."""
        name = f"localhost/kvstore-{target}:test-{gpu}"
        if name in self._built:
            return name
        self._built.add(name)
        given = {"PYTHON_IMAGE": BASE, "PYTHON_DIGEST": self.digest, "SOURCE": SOURCE}
        given |= {"GPU": "1"} if gpu else {}
        pairs = (f"{key}={value}" for key, value in given.items())
        self.buildah(
            *("build", "--isolation", "chroot", "--network", "host", "--pull-never", "--layers"),
            *(part for pair in pairs for part in ("--build-arg", pair)),
            *("--volume", CERTIFICATES, "--file", str(RECIPE), "--target", target),
            *("--tag", name, str(ROOT)),
        )
        return name

    def root(self, image: str) -> Path:
        """Its file system, mounted."""
        return self._container(image)[1]

    def run(self, image: str, *command: str) -> str:
        """The output of a command that buildah runs as the image's user without capabilities."""
        user = str(self.image(image)["OCIv1"]["config"]["User"])
        rights = ("--isolation", "chroot", "--user", user, "--cap-drop", "all")
        return self.buildah("run", *rights, self._container(image)[0], "--", *command)

    def _container(self, image: str) -> tuple[str, Path]:
        if image not in self._roots:
            name = self.buildah("from", "--pull-never", image)
            self._roots[image] = name, Path(self.buildah("mount", name))
        return self._roots[image]


class Container(ChildServer):
    """A command of an image; `process` is `unshare`, whose only child is the command, PID 1."""

    @classmethod
    def start(
        cls,
        root: Path,
        config: Mapping[str, Any],
        arguments: Sequence[str],
        *,
        volumes: Mapping[Path, str],
        log: Path,
    ) -> Container:
        """Start it and wait for its ready line.

        `config`: of the image, with User, Env and Entrypoint. `volumes`: folder of this machine →
        its place inside. Raises NodeFailed.
        """
        user, _, group = str(config["User"]).partition(":")
        mounts = [str(part) for pair in volumes.items() for part in pair]
        inside = [str(root), user, group, str(len(volumes)), *mounts, *config["Env"]]
        with log.open("w") as stderr:
            process = popen_tied(
                [
                    *("unshare", "--mount", "--pid", "--fork", "--kill-child"),
                    *("sh", "-c", _INSIDE, "sh", *inside, *config["Entrypoint"], *arguments),
                ],
                stdout=subprocess.PIPE,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                text=True,
                bufsize=1,
            )
        try:
            line = read_line(process, READY_S)
            if "ready:" not in line:
                process.kill()
                raise NodeFailed(process.wait(), log.read_text())
        except BaseException:
            reap(process)
            raise
        return cls(process, line, log)

    @property
    def first(self) -> psutil.Process:
        """PID 1 inside."""
        (found,) = psutil.Process(self.process.pid).children()
        return found

    @property
    def processes(self) -> list[psutil.Process]:
        """All of them."""
        return [self.first, *self.first.children(recursive=True)]

    def terminated(self, within_s: float) -> int:
        """SIGTERM, as a container runtime sends it; the exit code. Raises TimeoutExpired."""
        self.first.send_signal(signal.SIGTERM)
        return self.process.wait(within_s)

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # unshare ignores SIGTERM, and PID 1 ends with it
        super().__exit__()
