"""Numbers and names of clients, as they go into the core."""

from __future__ import annotations

import pytest

from kvstore.proto import router_pb2 as pb
from kvstore.router.front.intake import (
    OUTPUT_TOKENS,
    OUTPUT_TOKENS_MAX,
    SESSION_CHARACTERS_MAX,
    output_tokens,
    session_of,
)
from kvstore.router.keys.prefixes import Prefix
from kvstore.router.route_service import _request


@pytest.mark.parametrize(
    ("given", "estimated"),
    [(None, OUTPUT_TOKENS), (0, OUTPUT_TOKENS), (7, 7), (-(10**400), 1), (10**400, 1 << 24)],
)
def test_tokens_of_an_answer_are_estimated_within_bounds(given: int | None, estimated: int) -> None:
    assert output_tokens(given) == estimated


def test_a_session_keeps_its_name_if_that_is_short_text() -> None:
    for name in ("", "s-1", "séance", "a b", "s" * SESSION_CHARACTERS_MAX):
        assert session_of(name) == name


def test_other_sessions_are_told_apart_by_a_hash() -> None:
    odd = ["\udcff", "\udcfe", "\ud800", "a\nb", *("s" * 300 + str(n) for n in range(3))]
    found = {session_of(name) for name in odd}
    assert len(found) == len(odd)
    assert all(name.isascii() and len(name) == 64 for name in found)


def test_callers_of_the_route_service_have_the_same_bounds() -> None:
    ask = pb.Ask(model="m", session="s" * 100_000, output_tokens_max=2**32 - 1)
    request = _request(ask, "rpc-1", Prefix(1))
    assert request.output_tokens_max == OUTPUT_TOKENS_MAX
    assert request.session == session_of("s" * 100_000)
