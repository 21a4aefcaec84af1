"""Certificates for tests: an authority, and names that it vouches for.

Made by the openssl program. To be replaced by `kvstore certs`, once there is such a command.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

_COMMON: Final = (
    *("openssl", "req", "-x509", "-nodes", "-days", "2", "-newkey", "ec"),
    *("-pkeyopt", "ec_paramgen_curve:prime256v1"),
)


class Authority:
    """Of its own, in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._make("authority", "-subj", "/CN=authority")

    def options(self, name: str) -> dict[str, str]:
        """Of the tcp transport, for a node of this name."""
        signed = [
            *("-CA", str(self._folder / "authority.pem")),
            *("-CAkey", str(self._folder / "authority.key")),
        ]
        extensions = (f"subjectAltName=DNS:{name}", "basicConstraints=critical,CA:FALSE")
        added = [word for extension in extensions for word in ("-addext", extension)]
        if not (self._folder / f"{name}.pem").exists():
            self._make(name, "-subj", f"/CN={name}", *signed, *added)
        paths = {"ca": "authority.pem", "certificate": f"{name}.pem", "key": f"{name}.key"}
        return {option: str(self._folder / path) for option, path in paths.items()}

    def _make(self, name: str, *arguments: str) -> None:
        files = ("-keyout", f"{self._folder / name}.key", "-out", f"{self._folder / name}.pem")
        subprocess.run([*_COMMON, *arguments, *files], check=True, capture_output=True)
