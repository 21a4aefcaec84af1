"""A YAML file that an operator wrote: its content, or one sentence about its fault.

Ways to be wrong, each a ConfigError that says how to mend it: a file that cannot be read, is no
YAML, is nested too deeply or has a key twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kvstore.errors import ConfigError


def read_yaml(option: str, path: Path) -> Any:
    """Content of a file that `option` names. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
        twice = _twice(yaml.compose(text, Loader=yaml.SafeLoader), set())
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:  # such as a date that is none
        raise ConfigError(f"{option} {path} is not YAML: {_yaml_fault(error)}") from None
    except RecursionError:
        raise ConfigError(f"{option} {path} is nested too deeply: write fewer levels") from None
    if twice is not None:
        raise ConfigError(f"{option} {path} has {twice!r} twice: keep one of them")
    return content


def _yaml_fault(error: Exception) -> str:
    """Line, column and fault; PyYAML's own text repeats a name that is not the file's."""
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def _twice(node: yaml.Node | None, seen: set[int]) -> str | None:
    """A key that a mapping has twice, at any depth; None: there is none. YAML silently uses the
    last one. `seen`: ids of nodes that were looked at, since aliases repeat them.
    """
    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
        return None
    seen.add(id(node))
    children = node.value
    if isinstance(node, yaml.MappingNode):
        names = [str(key.value) for key, _ in node.value]
        if found := [name for name in names if names.count(name) > 1]:
            return found[0]
        children = [value for _, value in node.value]
    return next(filter(None, (_twice(child, seen) for child in children)), None)
