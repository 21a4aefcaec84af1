"""Settings as an operator writes them, YAML and flags, to the table's own types (`settings`).

Ways to be wrong, each a ConfigError that says how to mend it: a file that cannot be read, is no
YAML, is nested too deeply or has a key twice; an unknown key; a value of another type; no choice; a
number beyond its bounds; a setting without another that it needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from kvstore.config.settings import DaemonSettings, Setting, refuse_what_does_nothing, table
from kvstore.config.values import is_exposed
from kvstore.errors import ConfigError
from kvstore.installation import is_installed, lacking
from kvstore.wording import why_not

_S = TypeVar("_S", bound=DaemonSettings)
_THOUSANDS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def read_settings(path: Path | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a YAML file, if any, overridden by flags that are not None.

    `flags` has names or keys of settings; the result has keys.

    Raises:
        ConfigError: the file cannot be read.
    """
    lines = None if path is None else read_yaml("--config", path)
    lines = {} if lines is None else lines
    if not isinstance(lines, dict) or not all(isinstance(key, str) for key in lines):
        raise ConfigError(f"--config {path} must hold lines such as 'log-level: info'")
    given = {name.replace("_", "-"): value for name, value in flags.items() if value is not None}
    return lines | given


def load_settings(path: Path | None, flags: Mapping[str, Any], kind: type[_S]) -> _S:
    """The settings of `read_settings`, checked and parsed to the types of `kind`. Raises
    ConfigError.
    """
    given, rows = read_settings(path, flags), table(kind)
    for row in rows:
        value = given.get(row.key)
        if row.within is not None and value is not None:
            given[row.key] = _number(row, value, *row.within)
        elif row.choices and isinstance(value, str):
            given[row.key] = value.lower()
    fields = [(row.name, row.kind, row.default) for row in rows]
    checked = msgspec.defstruct(kind.__name__, fields, rename="kebab", forbid_unknown_fields=True)
    try:
        values = msgspec.structs.asdict(msgspec.convert(given, checked))
    except msgspec.ValidationError as error:
        where = f"--config {path}" if path else "configuration"
        raise ConfigError(f"{where}: {why_not(error, checked)}") from None
    refuse_what_does_nothing(kind(**values))
    for row in rows:
        given = values[row.name]
        values[row.name] = row.form.absent if given is None else row.form.parse(row.key, given)
    settings = kind(**values)
    pages = settings.metrics
    if pages and not (pages.is_loopback or settings.metrics_beyond_loopback):
        raise ConfigError(
            f"metrics on {pages.host} can be read from other machines: use 127.0.0.1, or add"
            " --metrics-beyond-loopback if intended"
        )
    if url := getattr(settings, "trace", None):
        if not is_installed("opentelemetry.exporter.otlp.proto.grpc"):
            raise ConfigError(lacking("--trace", "opentelemetry-exporter-otlp-proto-grpc", "trace"))
        if is_exposed(url) and not settings.insecure:
            raise ConfigError(
                f"--trace {url} is beyond this machine, and everybody on the way can read names of"
                " models and tenants: use https://, a collector on this machine, or --insecure"
            )
    return settings


def _number(row: Setting, value: object, least: int, most: int) -> int:
    """Number of a text such as 10000000, 10_000_000 or 10M. Raises ConfigError if it is out of
    bounds.
    """
    found = re.fullmatch(r"(\d[\d_]*)([kKMG]?)", str(value), re.ASCII)
    number = int(found[1].replace("_", "")) * _THOUSANDS[found[2].upper()] if found else -1
    if not least <= number <= most:
        short = " or 10M" if most >= 10 * _THOUSANDS["M"] else ""
        raise ConfigError(
            f"{row.key} {value!r} must be a number from {least} to {most}, such as"
            f" {row.default_text}{short}"
        )
    return number


# ── YAML ──────────────────────────────────────────────────────────────────────────────────────────


def read_yaml(option: str, path: Path) -> Any:
    """Content of a file that `option` names. Raises ConfigError."""
    import yaml  # only here: flags need no YAML

    class Once(yaml.SafeLoader):
        """Refuses a key that a mapping has twice, of which YAML silently uses the last one."""

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if twice := [name for name in names if names.count(name) > 1]:
                raise ConfigError(f"{option} {path} has {twice[0]!r} twice: keep one of them")
            return node

    try:
        return Once(path.read_text(encoding="utf-8")).get_single_data()
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:  # such as a date that is none
        raise ConfigError(f"{option} {path} is not YAML: {_yaml_fault(error)}") from None
    except RecursionError:
        raise ConfigError(f"{option} {path} is nested too deeply: write fewer levels") from None


def _yaml_fault(error: Exception) -> str:
    """Line, column and fault; PyYAML's own text repeats a name that is not the file's."""
    if mark := getattr(error, "problem_mark", None):
        return f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', '')}"
    return " ".join(str(error).split())
