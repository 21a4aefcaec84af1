"""Tests that are coroutines.

    @driven(run, count=2)                       @on_loop
    async def test_it(world, tmp_path): …       async def test_it(tmp_path): …

pytest sees a function of the fixtures alone.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

Sync = Callable[..., None]


def driven(drive: Callable[..., object], *args: Any, **options: Any) -> Callable[..., Sync]:
    """`drive(body, …)` makes a world, runs a loop, and awaits `body(world)` there. The first
    parameter of the test is that world; the others are fixtures and parameters."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Sync:
        @functools.wraps(test)
        def run(*values: Any, **fixtures: Any) -> None:
            drive(lambda world: test(world, *values, **fixtures), *args, **options)

        of_test = inspect.signature(test)
        fixtures = list(of_test.parameters.values())[1:]
        run.__signature__ = of_test.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return run

    return decorate


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Sync:
    """The test runs on an asyncio loop of its own."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run
