"""The policy file: YAML to the policy of the decision core, checked."""

from __future__ import annotations

from pathlib import Path

from kvstore.config.reading import read_yaml
from kvstore.errors import ConfigError
from kvstore.routing.policy import RoutingPolicy, parse


def load_policy(path: Path | None) -> RoutingPolicy:
    """`path` None: the default policy. Raises ConfigError."""
    content = read_yaml("--policy", path) if path is not None else {}
    try:
        return parse(content or {})
    except ValueError as error:
        raise ConfigError(f"--policy {path}: {error}") from None
