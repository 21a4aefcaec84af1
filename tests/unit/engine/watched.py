"""The cost of an event, without a clock: how much of an engine's columns is looked at, and how many
instructions of Python are executed."""

from __future__ import annotations

import contextlib
import sys
from types import FrameType
from typing import Any

import numpy as np

from kvstore.engine.engine import Engine

_OWN = "kvstore."


class Watched(np.ndarray):
    """A column that counts the elements that functions of numpy are given of it."""

    elements = 0
    whole: tuple[int, int] | None = None
    """A look at so many elements or more counts for so many times as many."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        _count(inputs)
        if "out" in options:
            options["out"] = tuple(map(_plain, options["out"]))
        return getattr(ufunc, method)(*map(_plain, inputs), **options)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        del types
        _count(args)
        return function(*map(_plain, args), **options)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value.view(np.ndarray) if isinstance(value, Watched) else value


def _count(inputs: Any) -> None:
    for value in inputs:
        if isinstance(value, Watched):
            limit, times = Watched.whole or (value.size + 1, 1)
            Watched.elements += value.size * (times if value.size >= limit else 1)


def watch(engine: Engine) -> None:
    """From now on every array that the engine keeps counts."""
    seen: set[int] = set()
    waiting: list[Any] = [engine]
    while waiting:
        found = waiting.pop()
        if id(found) in seen or not type(found).__module__.startswith(_OWN):
            continue
        seen.add(id(found))
        names = [name for kind in type(found).__mro__ for name in getattr(kind, "__slots__", ())]
        for name in {*names, *getattr(found, "__dict__", ())}:
            value = getattr(found, name, None)
            if isinstance(value, np.ndarray):
                with contextlib.suppress(AttributeError):  # of a frozen value: no column
                    setattr(found, name, value.view(Watched))
            else:
                waiting += value.values() if isinstance(value, dict) else [value]


def elements_of(engine: Engine, *events: Any, now_ns: int = 2 * 10**9) -> int:
    """How many elements of columns these events, in one step, have looked at."""
    before = Watched.elements
    engine.step(events, now_ns)
    return Watched.elements - before


def instructions_of(engine: Engine, *events: Any, now_ns: int) -> int:
    """Instructions of the product that these events, in one step, have executed. A loop over all
    that waits shows; one inside of a function of C does not."""
    count = 0

    def trace(frame: FrameType, what: str, argument: object) -> Any:
        nonlocal count
        del argument
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += what == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        engine.step(events, now_ns)
    finally:
        sys.settrace(before)
    return count
