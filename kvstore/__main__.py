"""The program: `kvstore` and `python -m kvstore`.

A plain installation suffices for the connector inside an engine; commands need the extra `node`.
Imports no package of the extra before all of them are found.
"""

from __future__ import annotations

import sys
from typing import Final

from kvstore.installation import is_installed, lacking

NODE_NEEDS: Final = {
    "click": "click",
    "cryptography": "cryptography",
    "google.protobuf": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "prometheus_client": "prometheus-client",
    "rich": "rich",
    "yaml": "pyyaml",
}
"""Modules of the extra `node`, and the packages that they are in."""


def missing_packages() -> list[str]:
    """Packages of the extra `node` that are not installed."""
    return [package for module, package in NODE_NEEDS.items() if not is_installed(module)]


def main() -> None:
    """Entry point of the console script."""
    try:
        if missing := missing_packages():
            sys.exit(f"kvstore: {lacking('every command', ', '.join(missing), 'node')}")
        from kvstore.cli.main import main as run

        run()
    except KeyboardInterrupt:  # while modules are imported
        sys.exit(1)
    except PermissionError as error:
        if not str(error.filename).endswith((".py", ".pyc")):
            raise
        sys.exit(
            f"kvstore: {error.filename} cannot be read: install it so that this user can read it"
        )


if __name__ == "__main__":
    main()
