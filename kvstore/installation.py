"""Packages installed beside the kvstore that runs, and the command that adds an extra to it.

Nobody owns the distribution's name on the public index: pip would run the code of whoever registers
it. The command therefore names the clone, folder or wheel that this installation came from.

Does not cover: whether other code has been installed since (`supervisor.handover`).
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import urllib.parse
from pathlib import Path
from typing import Final

from kvstore import __version__

DISTRIBUTION: Final = "kvstore-llm"


def is_installed(module: str) -> bool:
    """Whether a module can be imported. Imports the packages around it only."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def lacking(what: str, package: str, extras: str) -> str:
    """The sentence that says that `what` needs the missing `package`, with the command that
    installs `extras`."""
    return f"{what} needs {package}, not installed here: {pip_install(extras)}"


def pip_install(extras: str) -> str:
    """The `pip install` command that adds `extras` to this installation, to end a sentence with."""
    clone = Path(__file__).resolve().parents[1]
    if (clone / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{clone}[{extras}]')}"
    if origin := _origin():
        return f"pip install {shlex.quote(f'{origin}[{extras}]')}"
    return (
        f"pip install 'PATH/kvstore_llm-{__version__}-py3-none-any.whl[{extras}]', where PATH has"
        " the wheel that kvstore was installed from"
    )


def _origin() -> Path | None:
    """The wheel or folder that pip installed, if it is still there (PEP 610)."""
    # Only here: it takes milliseconds, and most processes lack nothing.
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        url = json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}").get("url")
    except (PackageNotFoundError, OSError, ValueError):
        return None
    parts = urllib.parse.urlsplit(url or "")
    path = Path(urllib.parse.unquote(parts.path))
    return path if parts.scheme == "file" and path.exists() else None
