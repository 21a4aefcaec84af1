"""The policy file: YAML to the policy of the decision core, checked."""

from __future__ import annotations

from pathlib import Path

from kvstore.config.yaml_file import read_yaml
from kvstore.errors import ConfigError
from kvstore.routing.policy import RoutingPolicy, parse


def load_policy(path: Path | None, *, is_again: bool = False) -> RoutingPolicy:
    """`path` None: the default policy. `is_again`: requests wait, and a pipe, such as a shell's
    `<(…)`, might never be read to its end. Raises ConfigError."""
    if is_again and path is not None and path.is_fifo():
        raise ConfigError(f"--policy {path} is a pipe, which is read once: reload a file")
    content = read_yaml("--policy", path) if path is not None else {}
    try:
        return parse(content or {})
    except ValueError as error:
        raise ConfigError(f"--policy {path}: {error}") from None
