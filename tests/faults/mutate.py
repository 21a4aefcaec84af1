"""Bad input made from good: bytes that were flipped, cut, spliced, and values of the wrong kind.

    Mutator(7, corpus).next()        a mutation of some member of the corpus
    Mutator(7, corpus).datagram(m)   a message of which one field has a value that it may not have

The same seed gives the same inputs.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from kvstore.types import PAGE_BYTES
from kvstore.units import MIB

GROWTH_BYTES_MAX: Final = 32 * MIB
_EDGES: Final = tuple(
    number.to_bytes(size, order, signed=number < 0)
    for size, numbers in {
        1: (0, 0x7F, 0xFF),
        2: (0, 0x7FFF, 0xFFFF),
        4: (0, 1, 0x7FFFFFFF, 0xFFFFFFFF),
        8: (0, 1, 1 << 62, (1 << 63) - 1, (1 << 64) - 1, -1),
    }.items()
    for number in numbers
    for order in ("little", "big")
)
_HUGE: Final = (
    b"\xdb\xff\xff\xff\xff",  # msgpack: a text, bytes, list and map of 4 GiB
    b"\xc6\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",  # protobuf: 2^63 bytes
    b"\x91" * 5_000,  # lists in lists
    b"\x0b" * 5_000,  # groups in groups
    b"[" * 5_000,
    b"{a: " * 2_000,
)
_VALUES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, 1, -1, 255, 65_535, 65_536, 2**31, 2**32, 2**53, 2**62, 2**63 - 1),
    *(2**63, 2**64 - 1, -(2**63), 0.5, float("nan"), float("inf"), "", "x", "é" * 200, "\x00"),
    *(b"", b"x", bytes(4), bytes(31), bytes(32), bytes(33), b"\xff" * 32, b"\xff" * 64),
    *([], [[]], [1, "a", None], list(range(64)), {}, {"type": "Seal"}, {"x": {"y": []}}),
)


class Mutator:
    """Random, but the same for the same seed."""

    def __init__(self, seed: int, corpus: Sequence[bytes]) -> None:
        assert corpus
        self.random = random.Random(seed)
        self._corpus = list(corpus)

    def next(self) -> bytes:
        """One to four mutations, one after the other, of some member of the corpus."""
        data = self.random.choice(self._corpus)
        for _ in range(self.random.choice((1, 1, 1, 2, 4))):
            data = self._mutated(data)
        return data

    def datagram(self, message: msgspec.Struct) -> bytes:
        """The message with a field of another value, without a field, or with one too many."""
        fields: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
        name = self.random.choice([*fields, "type", "stranger"])
        match self.random.randrange(8):
            case 0:
                fields.pop(name, None)
            case 1 if isinstance(fields.get(name), bytes):
                fields[name] = self._mutated(fields[name])
            case 2 if isinstance(fields.get(name), bytes):
                fields[name] = fields[name] * self.random.choice((2, 64))
            case 3 if isinstance(fields.get(name), int):
                fields[name] += self.random.choice((-1, 1, 2**20))
            case 4 if isinstance(fields.get(name), dict):
                inner = self.random.choice(list(fields[name]))
                fields[name][inner] = self.random.choice(_VALUES)
            case _:
                fields[name] = self.random.choice(_VALUES)
        try:
            return msgspec.msgpack.encode(fields)
        except OverflowError:  # a number that msgpack has no form for
            return b"\xcf" + b"\xff" * 8

    def _mutated(self, data: bytes) -> bytes:
        rng = self.random
        at = rng.randrange(len(data) + 1)
        match rng.randrange(9):
            case 0:
                return data[:at]
            case 1:
                return data[at:]
            case 2:
                return data[:at] + rng.randbytes(rng.randrange(1, 40)) + data[at:]
            case 3:
                other = rng.choice(self._corpus)
                return data[:at] + other[rng.randrange(len(other) + 1) :]
            case 4:
                edge = rng.choice(_EDGES)
                return data[:at] + edge + data[at + len(edge) :]
            case 5 if rng.random() < 0.2:
                return data[:at] + rng.choice(_HUGE) + data[at:]
            case 6:
                end = min(len(data), at + rng.randrange(64))
                return data[:end] + data[at:]
            case 7 if at < len(data):
                return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
            case 8 if at < len(data):
                return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            case _:
                return rng.randbytes(rng.randrange(1, 100))


def resident_bytes() -> int:
    """Memory of this process that is its own, shared memory left out."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * PAGE_BYTES


@contextmanager
def no_growth() -> Iterator[None]:
    """What runs inside may not leave this process more than GROWTH_BYTES_MAX larger."""
    gc.collect()
    before = resident_bytes()
    yield
    gc.collect()
    grown = resident_bytes() - before
    assert grown <= GROWTH_BYTES_MAX, f"{grown / MIB:.0f} MiB more"
