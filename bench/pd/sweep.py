"""Prompts and answers of several proportions: two engines as prefill and decode, or both as both.

Closed loop: as many clients as engines have room for take requests from one list. Colocated, the
same two engines get whole requests in turn. Goodput counts the tokens of requests that kept to both
limits, which come from the same engines with nothing else to do.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np

from bench.cluster.figures import plain
from kvstore.demo.engine import Completion, CompletionClient

RATIOS: Final = (20, 10, 5, 1)
"""Tokens of a prompt for each of the answer."""
CLIENTS: Final = 4
TTFT_LIMIT: Final = 3.0
TOKEN_LIMIT: Final = 2.0
"""Times what the engine takes alone."""


class Shape(NamedTuple):
    """Tokens of one request."""

    prompt: int
    answer: int


class Limits(NamedTuple):
    """Seconds that a request may take."""

    ttft_s: float
    token_s: float


def shapes(total_tokens: int) -> dict[int, Shape]:
    """By proportion; all of about the same length."""
    answers = {ratio: max(8, round(total_tokens / (1 + ratio))) for ratio in RATIOS}
    return {ratio: Shape(answer * ratio, answer) for ratio, answer in answers.items()}


def per_token_s(done: Completion) -> float:
    """Seconds from one token of the answer to the next, on average."""
    return (done.token_s[-1] - done.token_s[0]) / max(1, len(done.token_s) - 1)


def limits(engine: CompletionClient, prompts: Iterator[Sequence[int]], shape: Shape) -> Limits:
    """From one request at a time."""
    done = [_ask(engine, next(prompts), shape) for _ in range(2)]
    ttft_s = min(each.ttft_s for each in done)
    return Limits(TTFT_LIMIT * ttft_s, TOKEN_LIMIT * min(map(per_token_s, done)))


def _ask(engine: CompletionClient, prompt: Sequence[int], shape: Shape) -> Completion:
    extra: dict[str, object] = {"ignore_eos": True}
    return engine.complete(prompt[: shape.prompt], max_tokens=shape.answer, extra=extra)


def load(
    engines: Sequence[CompletionClient],
    prompts: Iterator[Sequence[int]],
    shape: Shape,
    count: int,
    bound: Limits,
) -> dict[str, float]:
    """Requests over these engines in turn: goodput, medians of both times."""
    asked = list(zip(itertools.cycle(engines), itertools.islice(prompts, count)))
    begin = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        done = list(pool.map(lambda its: _ask(its[0], its[1], shape), asked))
    took_s = time.perf_counter() - begin
    good = [
        each for each in done if each.ttft_s <= bound.ttft_s and per_token_s(each) <= bound.token_s
    ]
    return {
        "goodput_tokens_per_s": len(good) * sum(shape) / took_s,
        "tokens_per_s": len(done) * sum(shape) / took_s,
        "ttft_s": float(np.median([each.ttft_s for each in done])),
        "per_token_s": float(np.median([per_token_s(each) for each in done])),
        "within_limits": len(good) / len(done),
    }


def sweep(
    *,
    split: CompletionClient,
    colocated: Sequence[CompletionClient],
    fresh: Callable[[], Sequence[int]],
    total_tokens: int,
    count: int,
    rounds: int,
) -> dict[str, Any]:
    """Every proportion; both ways take turns in each round."""
    prompts = iter(fresh, None)
    detail: dict[str, Any] = {}
    for proportion, shape in shapes(total_tokens).items():
        bound = limits(colocated[0], prompts, shape)
        ways: dict[str, list[dict[str, float]]] = {"pd": [], "colocated": []}
        for _ in range(rounds):
            ways["pd"].append(load([split], prompts, shape, count, bound))
            ways["colocated"].append(load(colocated, prompts, shape, count, bound))
        medians = {
            way: {name: float(np.median([run[name] for run in runs])) for name in runs[0]}
            for way, runs in ways.items()
        }
        detail[f"{proportion}:1"] = {
            "shape": shape._asdict(),
            "limits_s": bound._asdict(),
            **medians,
            "pd_over_colocated": _over(medians["pd"], medians["colocated"]),
        }
    names = ("goodput_tokens_per_s", "tokens_per_s", "ttft_s", "per_token_s")
    over = {name: [row["pd_over_colocated"][name] for row in detail.values()] for name in names}
    figures = {
        f"{name}_over_colocated_{label}": plain(value)
        for name in names
        for label, value in zip(detail, over[name], strict=True)
        if value is not None
    }
    return {
        "figures": figures,
        "detail": {
            "by_proportion": detail,
            "break_even_input_per_output": {name: break_even(over[name]) for name in names},
        },
    }


def _over(pd: dict[str, float], colocated: dict[str, float]) -> dict[str, float | None]:
    """None: nothing to compare with."""
    return {name: pd[name] / colocated[name] if colocated[name] else None for name in pd}


def break_even(over: Sequence[float | None]) -> float | None:
    """The proportion, between those that were measured, at which a ratio crosses 1; None: it does
    not."""
    points = [
        (np.log(at), value - 1) for at, value in zip(RATIOS, over, strict=True) if value is not None
    ]
    for (left, a), (right, b) in itertools.pairwise(points):
        if a * b < 0:
            return round(float(np.exp(left + (right - left) * a / (a - b))), 2)
    return None
