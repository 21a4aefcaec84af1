"""Shared by commands: flags of settings, kinds of values, one way to print and to fail.

Modules of commands import click and defaults only, functions import the rest: `--help` answers at
once, and so do commands that need neither gRPC nor certificates.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import click

from kvstore.config.defaults import DEFAULT_SOCKET
from kvstore.config.settings import (
    Setting,
    Settings,
    in_group,
    refuse_what_does_nothing,
    table,
)
from kvstore.errors import ConfigError

_F = TypeVar("_F", bound=Callable[..., Any])
_S = TypeVar("_S", bound=Settings)


class Whole(click.IntRange):
    """Click type of a whole number within bounds."""

    name = "whole number"


class Number(click.FloatRange):
    """Click type of a finite number within bounds. Python also parses nan, which passes any
    comparison, and inf, which passes where there is no bound.
    """

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The value as a number. Raises click.BadParameter."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is no number: write one such as 2.5", param, ctx)
        return number


# Not checked by click: whoever opens it says which file it is, of which user, and what to do.
_A_PATH: Final = functools.partial(click.Path, path_type=Path, readable=False)
A_FILE: Final = _A_PATH(dir_okay=False)
A_DIRECTORY: Final = _A_PATH(file_okay=False)
_CONFIG_OPTION: Final = click.option(
    "--config",
    "config_path",
    type=A_FILE,
    help="YAML file with the names of the flags as keys; flags take precedence.",
)


def settings_options(kind: type[Settings], *, has_file: bool = True) -> Callable[[_F], _F]:
    """Decorator that adds a flag for each setting of a program, and --config. Flags that are not
    given are None.
    """
    options = [*map(_option, table(kind)), *([_CONFIG_OPTION] if has_file else [])]

    def add(command: _F) -> _F:
        return functools.reduce(lambda made, option: option(made), reversed(options), command)

    return add


def options(kind: type[_S]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator that adds a flag for each setting of a command, which is called with all of them as
    one object, and then with its arguments.
    """

    def add(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_settings(**flags: Any) -> None:
            given = {row.name: flags.pop(row.name) for row in table(kind)}
            settings = kind(**{k: value for k, value in given.items() if value is not None})
            refuse_what_does_nothing(settings)
            command(settings, **flags)

        return settings_options(kind, has_file=False)(with_settings)

    return add


def option(*names: str, **more: Any) -> Callable[[str], Any]:
    """A field of a command's settings: further names of its flag, arguments of click.option, then
    its meaning.
    """
    return in_group("")(click=(names, more))


SOCKET: Final = option(type=_A_PATH(), default=Path(DEFAULT_SOCKET), show_default=True)(
    "Attach socket of the node."
)


class NodeCommand(Settings):
    """Settings of a command that asks one node, and has no others."""

    socket: Path = SOCKET


def _option(row: Setting) -> Callable[[_F], _F]:
    if row.click is not None:
        names, its = row.click
        return click.option(f"--{row.key}", *names, row.name, help=row.meaning, **its)
    more: dict[str, Any] = {"metavar": row.form.metavar or None}
    flag = f"--{row.key}"
    if row.kind is bool:
        flag += f"/--{row.off}" if row.off else ""
        more = {"is_flag": True, "default": None}
    elif row.choices:
        more = {"type": click.Choice(row.choices)}
    elif row.holds(list) or row.holds(dict):
        more |= {"multiple": True, "callback": _mapping if row.holds(dict) else _list}
    shown = f"  [default: {row.default_text}]" if row.default_text else ""
    return click.option(flag, help=row.meaning + shown, **more)


def _list(_context: click.Context, _option: click.Parameter, given: Any) -> list[str] | None:
    return list(given) or None


def _mapping(_context: click.Context, option: click.Parameter, given: Any) -> Any:
    """Values of a repeated NAME=SHARE flag as a mapping; None: not given. A name may contain an
    `=`. Raises ConfigError: a name comes twice.
    """
    pairs = [(text.rpartition("=") if "=" in text else (text, "", ""))[::2] for text in given]
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{option.opts[0]} names {name!r} twice: keep one of them")
    return dict(pairs) or None


def as_json(**found: object) -> str:
    """One object, as every --json prints it."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(found)).decode()


def fail(sentence: str, *, code: int) -> NoReturn:
    """Print the error and exit."""
    click.echo(f"kvstore: {sentence}", err=True)
    sys.exit(code)
