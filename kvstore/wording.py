"""Validation errors of msgspec about settings, in an operator's words.

Covers: unknown keys with the nearest known one, kinds of values, ranges, choices; the sentence
about an address that is in use; texts of others in a terminal.
"""

from __future__ import annotations

import difflib
import errno
import re
import typing
from collections.abc import Iterable
from typing import Any, Final

import msgspec

KIND_NAMES: Final = {
    "str": "a text",
    "int": "a number",
    "float": "a fraction",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "empty",
}
_WANTED: Final = {"float": "a number"}
"""Names of kinds that accept values of other kinds, too: a float may be a whole number."""
_NO_ADDRESS: Final = {
    errno.EADDRINUSE: "the address is in use",
    errno.EADDRNOTAVAIL: "the address is not of this machine",
    errno.EACCES: "it is not permitted, as for ports below 1024",
    errno.EINVAL: "it is no address",
}
_AT_LEAST: Final = {">=": "at least", ">": "more than", "<=": "at most", "<": "less than"}


def printable(text: str) -> str:
    """The text with `?` for characters that are not printable: engines, nodes and users choose
    their names and ids, and terminals obey control characters."""
    return "".join(c if c.isprintable() else "?" for c in text)


def cannot_listen(option: str, address: str, error: OSError | None = None) -> str:
    """The sentence about an address that a server cannot have. `error` None: gRPC has no reason."""
    if error is None:
        why = "the address is in use or not of this machine"
    else:
        why = _NO_ADDRESS.get(error.errno or 0) or error.strerror or "no reason is known"
    return f"{option} cannot listen on {address}: {why}; choose another {option}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question to put behind a sentence about an unknown word; empty: no known one is near.
    Leading dashes of flags are not compared."""
    names = {each.lstrip("-"): each for each in known}
    near = difflib.get_close_matches(word.lstrip("-"), names, n=1)
    return f": did you mean {names[near[0]]!r}?" if near else ""


def why_not(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> str:
    """One clause about an error in settings of this `kind`: the key, and what is wrong with it."""
    text, _, place = str(error).partition(" - at `$.")
    key = _named(place.rstrip("`"))
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", text):
        near = did_you_mean(unknown[1], fields)
        return f"unknown key {unknown[1]!r}{near or '; known keys are ' + ', '.join(fields)}"
    if missing := re.fullmatch(r"Object missing required field `(.*)`", text):
        return f"{missing[1]} is missing"
    if kinds := re.fullmatch(r"Expected `(.*)`, got `(.*)`", text):
        wanted = (_WANTED.get(kind) or KIND_NAMES.get(kind, kind) for kind in kinds[1].split(" | "))
        clause = f"must be {' or '.join(wanted)}, not {KIND_NAMES.get(kinds[2], kinds[2])}"
        return f"{key} {clause}".lstrip()
    if limit := re.fullmatch(r"Expected `\w+` (of length )?([<>]=?) ([\d.]+)", text):
        if limit[0].endswith("of length >= 1"):
            return f"{key} must not be empty"
        unit = " characters long" if limit[1] else ""
        return f"{key} must be {_AT_LEAST[limit[2]]} {limit[3].removesuffix('.0')}{unit}"
    if key in fields and text.startswith("Invalid enum value"):
        choices = _choices(fields[key].type)
        if choices:
            given = text.removeprefix("Invalid enum value ")
            return f"{key} {given} must be one of {', '.join(choices)}"
    return f"{key}: {text[0].lower()}{text[1:]}"


def _named(key: str) -> str:
    """The key as a clause names it. msgspec does not name the key of a value in a mapping: this is
    `a value of` the mapping."""
    return f"a value of {key.removesuffix('[...]')}" if key.endswith("[...]") else key


def _choices(kind: Any) -> list[str]:
    """Values of a Literal, also of an optional one."""
    is_literal = typing.get_origin(kind) is typing.Literal
    kinds = typing.get_args(kind)
    return sorted(kinds) if is_literal else [each for kind in kinds for each in _choices(kind)]
