"""The loops of the index, compiled to machine code with numba, or as plain Python (ADR 10).

Compiled (extra `index`) when the first `Holdings` of a process is made, never while it answers.
Nothing is kept on disk: numba's cache would be a pickle that anybody who can write to the folder
could replace.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

from kvstore.index import loops, rows, sets


class Loops(NamedTuple):
    """Functions that `Holdings` calls; `loops.py` has the arguments."""

    store: Callable[..., None]
    remove: Callable[..., None]
    sweep: Callable[..., bool]
    match: Callable[..., int]


PLAIN = Loops(loops.store, loops.remove, loops.sweep, loops.match)
"""The loops as plain Python, on memoryviews: the reference, and used where numba is not
installed."""


def is_available() -> bool:
    """Is numba installed?"""
    return importlib.util.find_spec("numba") is not None


@functools.cache
def compiled() -> Loops:
    """The loops compiled; they take numpy arrays. The first call takes seconds."""
    import numba
    from numba import types

    int32s, int64s = types.int32[::1], types.int64[::1]
    kinds = dict.fromkeys(("rows", "cells", "sets", "set_cells", "slots", "scratch"), int32s)
    kinds |= {"meta": int64s, "keys": types.Array(types.int32, 1, "C", readonly=True)}
    # The functions call each other by name: in a namespace of their own they call machine code, of
    # which there is one piece each because the types of all arguments are said beforehand.
    space: dict[str, Any] = {}
    for module in (rows, sets, loops):
        space |= vars(module)
    for name, function in _in_order(space):
        names = inspect.signature(function).parameters
        space[name] = numba.njit(
            tuple(kinds.get(argument, types.int64) for argument in names),
            error_model="numpy",  # no check for division by zero: there is none
            no_cpython_wrapper=name not in Loops._fields,
            no_cfunc_wrapper=True,
        )(FunctionType(function.__code__, space, name))
    return Loops(*(space[name] for name in Loops._fields))


def _in_order(space: dict[str, Any]) -> list[tuple[str, FunctionType]]:
    """Names and functions of `space`, each function behind those that it calls."""
    functions = {name: value for name, value in space.items() if inspect.isfunction(value)}
    done: dict[str, FunctionType] = {}
    while len(done) < len(functions):
        for name, function in functions.items():
            if functions.keys() & set(function.__code__.co_names) <= done.keys():
                done[name] = function
    return list(done.items())
