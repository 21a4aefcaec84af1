"""Bodies: what is read, what is dropped, and that all else stays as it came."""

from __future__ import annotations

import json
import tracemalloc

import msgspec
import pytest
from hypothesis import given, strategies as st

from kvstore.router.front.intake import (
    COLONS_MAX,
    NAME_BYTES_MAX,
    STRIPPED,
    BadBody,
    edited,
    number_of,
    peek,
    peek_form,
    peek_unknown,
    plain,
    text_of,
)
from kvstore.router.keys.prefixes import (
    PIECE_BYTES,
    content_of,
    keys_of_bytes,
    prompts_of,
)
from kvstore.types import KEY_BYTES

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
NAMES = st.sampled_from(["model2", "x", *STRIPPED, "cache_salt"]) | st.text(max_size=8)
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
    assert peek(body).given(STRIPPED)
    assert json.loads(edited(body, drop=STRIPPED)) == {"model": "b"}


@pytest.mark.parametrize(
    "body",
    [
        b'\xef\xbb\xbf{"model":"m","x":1}',
        '{"model":"m","x":1}'.encode("utf-16"),
        b'{"model":"m","user":"\\ud83d"}',
        b'{"model":"m","logit_bias":{"5":-Infinity},"x":NaN}',
    ],
)
def test_what_engines_read_all_the_same_is_made_plain(body: bytes) -> None:
    json.loads(body)
    with pytest.raises(BadBody):
        peek(body)
    made = plain(body)
    assert made is not None
    assert peek(made).model == "m"


@pytest.mark.parametrize(
    "body", [b"", b"x", b"\xff\xfe", b'{"a":' * 9000, b'{"a":1} x', b'{"a":"\n"}']
)
def test_what_no_engine_reads_stays_refused(body: bytes) -> None:
    assert plain(body) is None


def test_fields_are_read_whatever_else_is_there() -> None:
    read = peek(b'{"model":"m","prompt":[1,2,3],"max_tokens":7,"user":"u","stream":true,"y":{}}')
    assert (read.model, number_of(read.max_tokens), text_of(read.user)) == ("m", 7, "u")
    assert read.is_streamed
    assert not read.given(STRIPPED)
    odd = peek(b'{"model":null,"max_tokens":"many","user":3,"stream":1,"cache_salt":[]}')
    assert (odd.model, number_of(odd.max_tokens), text_of(odd.user)) == ("", None, "")
    assert (odd.is_streamed, text_of(odd.cache_salt)) == (False, "")
    numbers = [number_of(msgspec.Raw(each)) for each in (b"-3", b"true", b"1.5", b"null", b"")]
    assert numbers == [-3, None, None, None, None]
    assert text_of(msgspec.Raw(b"{}")) == text_of(msgspec.Raw(b"")) == ""


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b'{"model":1}', b'{"model":"m"} x', b"{" * 9999]
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(BadBody, match="the body is not"):
        peek(body)


@given(st.binary(min_size=PIECE_BYTES, max_size=5 * PIECE_BYTES), st.binary(max_size=600))
def test_prompts_that_begin_alike_share_keys(shared: bytes, rest: bytes) -> None:
    first, other = (keys_of_bytes(shared + tail, b"m") for tail in (rest, b"\0" + rest))
    count = len(shared) // PIECE_BYTES
    assert first[: KEY_BYTES * count] == other[: KEY_BYTES * count]
    assert len(first) == KEY_BYTES * (len(shared + rest) // PIECE_BYTES)
    assert keys_of_bytes(shared, b"other")[:KEY_BYTES] != first[:KEY_BYTES]


def test_the_name_of_a_model_is_bounded() -> None:
    name = "m" * NAME_BYTES_MAX
    assert peek(json.dumps({"model": name}).encode()).model == name
    with pytest.raises(BadBody, match=f"longer than {NAME_BYTES_MAX} characters"):
        peek(json.dumps({"model": name + "m"}).encode())


def test_the_prompt_is_made_of_what_requests_share_first() -> None:
    fields = ["text_2", "items", "documents", "text_1", "queries", "query", "input", "messages"]
    fields += ["prompt", "instructions", "system", "tools"]
    body = {"model": "m", "n": 1, **{name: name for name in fields}}
    shared = [f'"{name}"' for name in reversed(fields)]
    assert content_of(peek(json.dumps(body).encode())).decode() == "".join(shared)


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ('["a", "b"]', 2),
        (' [ "a" , [1] ]', 2),
        ("[[1, 2], [3]]", 2),
        ('["a"]', 0),
        ("[1, 2, 3]", 0),
        ("[]", 0),
        ('"[text"', 0),
        ("{}", 0),
        ("null", 0),
        ('[{"a": 1}, {"a": 2}]', 0),
    ],
)
def test_a_list_of_prompts_is_known_by_its_parts(prompt: str, count: int) -> None:
    read = peek(f'{{"prompt":{prompt}}}'.encode())
    assert len(prompts_of(read)) == count
    if count:
        assert [json.loads(bytes(each)) for each in prompts_of(read)] == json.loads(prompt)


FORM = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n--b--\r\n'
KIND = "multipart/form-data; boundary=b"


def test_a_form_is_read_for_its_model_and_steers_nothing() -> None:
    assert peek_form(FORM % (b"model", b" m "), KIND).model == "m"
    assert peek_form(FORM % (b"model", b"m" * 9999), KIND).model == "m" * NAME_BYTES_MAX
    assert peek_form(FORM % (b"stream", b"True"), KIND).is_streamed
    assert peek_form(FORM % (b"file", b"bytes of kv_transfer_params"), KIND).model == ""
    with pytest.raises(BadBody, match="no boundary"):
        peek_form(FORM % (b"model", b"m"), "multipart/form-data")
    assert peek_form(FORM % (b'x"; filename="model.wav', b"n"), KIND).model == ""


@pytest.mark.parametrize(
    ("boundary", "said"),
    [
        ("a b", '"a b"'),
        ("a;b,c", '"a;b,c"'),
        ('a"b', '"a\\"b"'),
        ("x" * 90, "x" * 90),
        ("z", 'b; x="boundary=y"; BOUNDARY = z'),
        ("\N{REPLACEMENT CHARACTER}", "\udcff"),
    ],
)
def test_a_boundary_is_what_engines_take_for_it(boundary: str, said: str) -> None:
    form = (FORM % (b"model", b"m")).replace(b"--b", b"--" + boundary.encode())
    assert peek_form(form, f"multipart/form-data; boundary={said}").model == "m"


def test_a_long_content_type_is_refused_unread() -> None:
    with pytest.raises(BadBody, match="longer than 1024 characters"):
        peek_form(b"", "multipart/form-data" + ";" * 200_000 + "boundary=b")


XARGS = b'--b\r\nContent-Disposition: form-data; name="vllm_xargs"\r\n'


@pytest.mark.parametrize("name", sorted(STRIPPED))
@pytest.mark.parametrize(
    "form",
    [
        FORM % (b"%b", b"1"),
        FORM % (b'x";name="%b', b"1"),
        FORM.replace(b'name="%b"', b"NAME = %b") % (b"%b", b"1"),
        FORM % (b"vllm_xargs", b'{"%b":1}'),
        XARGS + b'X: --b\r\n\r\n{"%b":1}\r\n--b--\r\n',  # the engine sees one part
        XARGS + b'--bX: 1\r\n\r\n{"%b":1}\r\n--b--\r\n',
        b"--other\r\n" + FORM % (b"%b", b"1"),
    ],
    ids=range(7),
)
def test_no_form_steers_its_engine(form: bytes, name: str) -> None:
    for kind in (KIND, KIND + "; boundary=other", 'multipart/form-data; boundary="a\\"b"'):
        with pytest.raises(BadBody, match=f"no client may set: {name}"):
            peek_form(form % name.encode(), kind)


@pytest.mark.parametrize("gap", ["\x1c", "\x1f", "\x85", "\xa0", '"\x0b', "\xa0<"])
def test_no_space_of_latin_hides_the_name_of_a_field(gap: str) -> None:
    """Engines with an old multipart parser strip these, as `email` does."""
    form = FORM.replace(b'name="%b"', b"name=%bdata_parallel_rank") % (gap.encode("latin-1"), b"1")
    with pytest.raises(BadBody, match="no client may set: data_parallel_rank"):
        peek_form(form, KIND)


@pytest.mark.parametrize(
    "name",
    [
        *(b"name*=utf-8''data%5Fparallel_rank", b'name*0="vllm_"; name*1="xargs"'),
        *(b"x=1;NAME*0*=''kv_tran; name*1 =sfer_params", b"\xa0name*0=a", b"name*0\x1c=a"),
    ],
)
def test_no_name_of_a_field_is_encoded(name: bytes) -> None:
    """Engines with an old multipart parser decode it, as `email` does."""
    with pytest.raises(BadBody, match="encoded name"):
        peek_form(FORM.replace(b'name="%b"', name).replace(b"%b", b"1"), KIND)
    kept = (
        FORM.replace(b'"%b"', b"\"file\"; filename*=utf-8''a%%20b") % b"a * name*b = filename*0=c"
    )
    assert peek_form(kept, KIND).model == ""


def test_a_form_with_very_many_names_takes_no_memory_for_them() -> None:
    form = FORM % (b"file", b"data_parallel_rank" + b"name=abc;" * (1 << 18))
    tracemalloc.start()
    try:
        assert peek_form(form, KIND).model == ""
        assert tracemalloc.get_traced_memory()[1] < 4 * len(form)
    finally:
        tracemalloc.stop()


def test_names_that_json_escapes_are_no_way_round() -> None:
    text = FORM % (b"vllm_xargs", b'{"kv\\u005ftransfer_params":"x"}')
    with pytest.raises(BadBody, match="escapes in vllm_xargs"):
        peek_form(text, KIND)
    assert peek_form(FORM % (b"vllm_xargs", b'{"top":1}'), KIND).model == ""
    assert peek_form(FORM % (b"file", b"\\u005f"), KIND).model == ""


@pytest.mark.parametrize("space", ["", " \n"])
def test_a_body_of_perhaps_many_fields_is_edited_behind_its_end(space: str) -> None:
    given = {"model": "m", "prompt": ":" * COLONS_MAX, "cache_salt": "mine", "priority": 1}
    body = (json.dumps(given) + space).encode()
    made = json.loads(edited(body, drop=["priority"], put={"cache_salt": "a"}))
    assert made == given | {"cache_salt": "a", "priority": None}, "the last of two counts"
    assert edited(body) is body
    few = json.dumps(given | {"prompt": "x" * COLONS_MAX}).encode()
    assert edited(few, put={"model": "n"}).count(b'"model"') == 1, "parsers in Rust refuse a second"


LONG = b'{"x":%b,"bootstrap_host":"evil"}'


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (LONG % (b"1" * 5000), "no client may set: bootstrap_host"),
        (LONG % (b"[" * 200_000 + b"]" * 200_000), "nested too deeply"),
        (LONG % (b"[" + b"1.5," * 2_000_000 + b"1]"), "above 4194304 bytes"),
        (b'{"\\u006bv_transfer_params":1}', "no client may set: kv_transfer_params"),
        ('{"bootstrap_host":1}'.encode("utf-32-le"), "no client may set: bootstrap_host"),
    ],
    ids=range(5),
)
def test_no_body_of_an_unknown_path_steers_its_engine(body: bytes, why: str) -> None:
    with pytest.raises(BadBody, match=why):
        peek_unknown(body, "application/json")


def test_a_large_body_of_an_unknown_path_is_not_taken_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it takes seconds"))
    rows = b'{"a":1.5},' * 3_000_000
    for body in (b'{"model":"m","b":"\\u4e2d","c":[%b1]}' % rows, b"\0" * 20_000_000):
        assert peek_unknown(body, "").model == "m" * (body[:1] == b"{")
