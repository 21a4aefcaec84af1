"""Bodies whose tokens are made here. All others are left to an engine's renderer.

    a completion of one list of tokens                                    ids
    a completion of one text; a chat whose messages are a role and a text local
    with any field that is not in PLAIN_FIELDS, or anything else          empty: an engine renders

Renderers normalise: vLLM fills in the defaults of tools, in its own order of fields, parses the
arguments of calls, calls a developer a system, and drops parts of contents. Here is a list of the
rest, so that a field nobody has looked at costs a call of an engine, and never wrong keys.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from kvstore.router.front.bodies import fields_of

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
PLAIN_FIELDS: Final = frozenset(
    {
        *("model", "stream", "stream_options", "max_tokens", "temperature", "service_tier"),
        *("max_completion_tokens", "top_p", "top_k", "min_p", "n", "seed", "stop", "user"),
        *("presence_penalty", "frequency_penalty", "logprobs", "top_logprobs", "cache_salt"),
        *("ignore_eos", "min_tokens", "session_id", "priority", "repetition_penalty", "store"),
        *("stop_token_ids", "metadata", "logit_bias", "request_id", "skip_special_tokens"),
        *("return_token_ids", "include_stop_str_in_output"),
    }
)
"""Fields beside the prompt that change none of its tokens."""
_OF_FIRST: Final[dict[bytes, Literal["ids", "local"]]] = {b"[": "ids", b'"': "local"}


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: msgspec.Raw


_messages: Final = msgspec.json.Decoder(list[_Message])


def source_of(path: str, body: bytes) -> Literal["ids", "local", ""]:
    """Source of the tokens of a body that is known to be an object; empty: an engine."""
    try:
        fields = fields_of(body)
        named = {n for n in fields.keys() - PLAIN_FIELDS if bytes(fields[n]) != b"null"}
        if named == {"prompt"} and path == COMPLETIONS:
            return _OF_FIRST.get(bytes(fields["prompt"])[:1], "")
        if named == {"messages"} and path == CHAT:
            firsts = {bytes(each.content)[:1] for each in _messages.decode(fields["messages"])}
            return "local" if firsts == {b'"'} else ""
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass
    return ""
