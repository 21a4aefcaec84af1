"""The policy file: YAML to the policy of the decision core, checked."""

from __future__ import annotations

from pathlib import Path

import yaml

from kvstore.errors import ConfigError
from kvstore.routing.policy import RoutingPolicy, parse


def load_policy(path: Path | None) -> RoutingPolicy:
    """`path` None: the default policy. Raises ConfigError."""
    if path is None:
        return RoutingPolicy()
    try:
        return parse(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    except OSError as error:
        raise ConfigError(f"--policy {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        raise ConfigError(f"--policy {path} is not YAML: lines such as 'policy: cost'") from None
    except ValueError as error:
        raise ConfigError(f"--policy {path}: {error}") from None
