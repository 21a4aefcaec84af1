"""Bodies: what is read, what is dropped, and that all else stays as it came."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st

from kvstore.router.front.bodies import STRIPPED, BadBody, edited, peek
from kvstore.router.keys.prefixes import PIECE_BYTES, prefix_of_bytes

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
NAMES = st.sampled_from(["model2", "x", *STRIPPED, "cache_salt"]) | st.text()
BODIES = st.dictionaries(NAMES, PLAIN)


@given(BODIES)
def test_an_edited_body_differs_in_what_was_edited_only(content: dict[str, object]) -> None:
    body = json.dumps(content).encode()
    found = json.loads(edited(body, drop=STRIPPED, put={"cache_salt": "t"}))
    kept = {name: value for name, value in content.items() if name not in STRIPPED}
    assert found == kept | {"cache_salt": "t"}


def test_values_keep_their_bytes() -> None:
    body = b'{"seed": 1e2, "n": 12345678901234567890123, "a": [1.10,  2], "b": "\\u00e9", "x": 1}'
    found = edited(body, drop={"x"})
    for piece in (b"1e2", b"12345678901234567890123", b"[1.10,  2]", b'"\\u00e9"'):
        assert piece in found


def test_of_a_repeated_field_the_last_counts_and_one_is_left() -> None:
    body = b'{"model": "a", "kv_transfer_params": 1, "model": "b", "kv_transfer_params": null}'
    assert peek(body).model == "b"
    assert peek(body).is_stripped
    assert json.loads(edited(body, drop=STRIPPED)) == {"model": "b"}


def test_fields_are_read_whatever_else_is_there() -> None:
    read = peek(b'{"model":"m","prompt":[1,2,3],"max_tokens":7,"user":"u","stream":true,"y":{}}')
    assert (read.model, read.output_tokens, read.session) == ("m", 7, "u")
    assert read.is_streamed
    assert not read.is_stripped
    odd = peek(b'{"model":"m","max_tokens":"many","user":3,"stream":1,"cache_salt":[]}')
    assert (odd.output_tokens, odd.session, odd.is_streamed, odd.salt) == (None, "", False, "")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b'{"model":1}', b'{"model":"m"} x', b"{" * 9999]
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(BadBody, match="the body is not"):
        peek(body)


@given(st.binary(min_size=PIECE_BYTES, max_size=5 * PIECE_BYTES), st.binary(max_size=600))
def test_prompts_that_begin_alike_share_keys(shared: bytes, rest: bytes) -> None:
    first, other = (prefix_of_bytes(shared + tail, "m", "") for tail in (rest, b"\0" + rest))
    count = len(shared) // PIECE_BYTES
    assert first.keys[: 32 * count] == other.keys[: 32 * count]
    assert len(first.keys) == 32 * (len(shared + rest) // PIECE_BYTES)
    assert prefix_of_bytes(shared, "m", "salt").keys[:32] != first.keys[:32]
    assert prefix_of_bytes(shared, "other", "").keys[:32] != first.keys[:32]
