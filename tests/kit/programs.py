"""Programs that tests start and Debian has in packages of their own (`.ci/debian-packages.txt`)."""

from __future__ import annotations

import shutil
from typing import Final

import pytest

PACKAGES: Final = {
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "docker-compose": "docker-compose",
    "chromium": "chromium",
    "g++": "g++",
    "ip": "iproute2",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "redis-server": "redis-server",
    "strace": "strace",
    "systemd-analyze": "systemd",
}


def need(program: str) -> None:
    """Leave out the test where it is missing; the end of a run lists those with the reason."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed: apt-get install {PACKAGES[program]}")
