"""A block's address and checksum, and the page that stands before it on disk.

    header      magic ‖ version ‖ tenant ‖ space ‖ shard ‖ length ‖ key
    payload     │ piece 0 │ piece 1 │ … │ last │      PIECE_BYTES each, the last what is left
    checksum    xxh3-128( header ‖ xxh3-128(piece 0) ‖ xxh3-128(piece 1) ‖ … )

The checksum is a tree of two levels over header and payload, so a block that is intact but belongs
to another key, tenant, model or shard fails just as a flipped bit does. The header says how long
the payload is and so how many pieces there are. A piece needs nothing but its own bytes: threads, a
device, or pieces that arrive in any order can make their parts of it. Digests of pieces have all
128 bits: with 64 a changed piece would pass one time in 2⁶⁴, however good the root, and they would
be no cheaper. 512 KiB is the smallest power of two that costs about 5 % over one hash of
everything, and on the copy of a block less (bench/micro/checksum.py, ADR 7). The size is part of
the form: changing it takes a new RECORD_VERSION.

The same header opens a record on disk: a page of 4 KiB and, for a block, the payload behind it,
padded with zeros to whole pages. All numbers little-endian:

    offset 0   magic KVSR   4 version u16    6 kind u16 (1 block, 2 void)
    8          segment id, 16 bytes         24 place u64: segment number << 32 | page in the file
    32         void: blocks before this place are gone; block: 0
    40         the block's checksum, 16     56 key, 32    88 filter u16   90 prefix length u16
    92         prefix: the part of the header that all blocks of a rank share
    4080       xxh3-128 of the 4080 bytes before

A place says where a record is and how old it is: segments are numbered upwards and never appended
to after a restart, so a greater place was written later.

Ways to be broken: other magic or version; tenant over 255 bytes; space or key of another length;
payload shorter or longer than `length`; checksum that differs. On disk too: page checksum that
differs; unknown kind or filter; place or segment id that is not where the page was found; a prefix
that says another length than the text it has; a payload that would end outside the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
import xxhash
from msgspec.structs import astuple

from kvstore.types import CHECKSUM_BYTES, KEY_BYTES, PAGE_BYTES, BlockKey, Shard
from kvstore.wire.bounds import U64, BlockBytes, Checksum, Key, Name

MAGIC = b"KVSB"
RECORD_VERSION = 2
_PREFIX = struct.Struct("<4sHH32s4IQ")

PIECE_BYTES: Final = 512 << 10
PAGE_MAGIC: Final = b"KVSR"
KIND_BLOCK: Final = 1
KIND_VOID: Final = 2
PAGE_COVERED: Final = PAGE_BYTES - CHECKSUM_BYTES
"""A page's own checksum covers this many bytes and follows them."""
PAYLOAD_BYTES_MAX: Final = 1 << 30
_PAGE = struct.Struct("<4sHH16sQQ16s32sHH")
_HAS_TENANT, _HAS_SPACE = 1, 2


def header(prefix: bytes, key: BlockKey) -> bytes:
    """Bytes that a block's checksum covers beside its payload."""
    assert len(key) == KEY_BYTES
    return prefix + key


class Scope(msgspec.Struct, frozen=True):
    """Address of a block without its key: common to all blocks of one rank of one engine."""

    tenant: Name
    space: Key
    shard: Shard
    block_bytes: BlockBytes

    def prefix(self) -> bytes:
        """The part of the header that all these blocks share; the tenant's name comes last."""
        name = self.tenant.encode()
        assert len(name) <= 255, "the attach protocol limits tenant names"
        assert len(self.space) == 32
        begin = MAGIC, RECORD_VERSION, len(name), self.space
        return _PREFIX.pack(*begin, *astuple(self.shard), self.block_bytes) + name


def scopes_of(
    tenant: str, space: bytes, shards: Sequence[Shard], block_bytes: Sequence[int]
) -> tuple[Scope, ...]:
    """Scopes of one space: a shard and the size of a block in it each."""
    sizes = zip(shards, block_bytes, strict=True)
    return tuple(Scope(tenant, space, shard, size) for shard, size in sizes)


def payload_pages(block_bytes: int) -> int:
    """Pages that a payload takes."""
    return -(-block_bytes // PAGE_BYTES)


def record_pages(scope: Scope) -> int:
    """Pages that a record of this scope takes, its header included."""
    return 1 + payload_pages(scope.block_bytes)


def parse_prefix(prefix: bytes) -> Scope | None:
    """The scope that a prefix describes, or None if it is broken in any way."""
    if len(prefix) < _PREFIX.size:
        return None
    magic, version, length, space, *shard, block_bytes = _PREFIX.unpack_from(prefix)
    name = prefix[_PREFIX.size :]
    if magic != MAGIC or version != RECORD_VERSION or length != len(name) or length > 255:
        return None
    if not 0 < block_bytes <= PAYLOAD_BYTES_MAX:
        return None
    try:
        return Scope(name.decode(), space, Shard(*shard), block_bytes)
    except UnicodeDecodeError:
        return None


# ── checksums ─────────────────────────────────────────────────────────────────────────────────────


def checksum_of(header: bytes, parts: Iterable[bytes | bytearray | memoryview]) -> bytes:
    """The 16 bytes of a block's checksum.

    Args:
        header: its address.
        parts: its payload in order, cut anywhere, in bytes. Each is hashed before the next is asked
            for: they may be copied, or read into the same buffer, on the way. Large ones are hashed
            without the GIL.
    """
    pieces = []
    digest, room = xxhash.xxh3_128(), PIECE_BYTES
    for part in parts:
        rest = part
        while len(rest) >= room:
            digest.update(rest[:room])
            pieces.append(digest.digest())
            digest.reset()
            rest, room = rest[room:], PIECE_BYTES
        digest.update(rest)
        room -= len(rest)
    if room < PIECE_BYTES:
        pieces.append(digest.digest())
    return root_of(header, b"".join(pieces))


def piece_count(size_bytes: int) -> int:
    """How many pieces a payload of that size has."""
    return -(-size_bytes // PIECE_BYTES)


def root_of(header: bytes, digests: bytes | memoryview) -> bytes:
    """The checksum, of the digests of all pieces, in order."""
    return xxhash.xxh3_128_digest(header + digests)


# ── records ───────────────────────────────────────────────────────────────────────────────────────


class Void(msgspec.Struct, frozen=True):
    """Blocks of this tenant and space (None: of any) at places before `before` are gone."""

    tenant: Name | None
    space: Key | None
    before: U64

    def covers(self, blocks: Scope | Void) -> bool:
        """Whether these blocks are meant, wherever they lie."""
        return self.tenant in (None, blocks.tenant) and self.space in (None, blocks.space)


class BlockPage(msgspec.Struct, frozen=True):
    """Content of the page before a block."""

    scope: Scope
    key: Key
    checksum: Checksum


def seal_page(page: bytes | bytearray | memoryview) -> bytes:
    """The checksum that belongs at the end of this page."""
    return xxhash.xxh3_128_digest(memoryview(page)[:PAGE_COVERED])


def page_is_whole(page: bytes | memoryview) -> bool:
    """True when a page carries its own checksum."""
    view = memoryview(page)
    return len(view) == PAGE_BYTES and seal_page(view) == bytes(view[PAGE_COVERED:])


def write_block_page(
    page: memoryview, *, prefix: bytes, key: bytes, checksum: bytes, segment_id: bytes, place: int
) -> None:
    """Fill `page`, [4096] bytes."""
    _fill(page, KIND_BLOCK, (segment_id, place, 0, checksum, key, 0), prefix)


def void_page(void: Void, *, segment_id: bytes, place: int) -> bytes:
    """The page of a void record."""
    page = bytearray(PAGE_BYTES)
    filters = (_HAS_TENANT * (void.tenant is not None)) | (_HAS_SPACE * (void.space is not None))
    name, space = (void.tenant or "").encode(), void.space or bytes(32)
    text = space + name
    none = bytes(CHECKSUM_BYTES), bytes(KEY_BYTES)
    _fill(page, KIND_VOID, (segment_id, place, void.before, *none, filters), text)
    return bytes(page)


def _fill(
    page: memoryview | bytearray, kind: int, fields: tuple[bytes | int, ...], text: bytes
) -> None:
    """Write a page: `fields` from the segment id to the filter, the text behind them, and the
    page's own checksum."""
    _PAGE.pack_into(page, 0, PAGE_MAGIC, RECORD_VERSION, kind, *fields, len(text))
    page[_PAGE.size : PAGE_COVERED] = text.ljust(PAGE_COVERED - _PAGE.size, b"\0")
    page[PAGE_COVERED:] = seal_page(page)


def parse_page(
    page: bytes | memoryview, *, segment_id: bytes, place: int
) -> BlockPage | Void | None:
    """Content of the page at `place` of a segment, or None: not a record of this place."""
    if bytes(page[:4]) != PAGE_MAGIC or not page_is_whole(page):
        return None
    (_, version, kind, found_id, found_place, before, checksum, key, filters, length) = (
        _PAGE.unpack_from(page)
    )
    if version != RECORD_VERSION or found_id != segment_id or found_place != place:
        return None
    if _PAGE.size + length > PAGE_COVERED:
        return None
    rest = bytes(page[_PAGE.size : _PAGE.size + length])
    if kind == KIND_BLOCK:
        scope = parse_prefix(rest)
        return BlockPage(scope, key, checksum) if scope is not None else None
    if kind != KIND_VOID or filters & ~3 or not 32 <= length <= 32 + 255:
        return None
    try:
        tenant = rest[32:].decode() if filters & _HAS_TENANT else None
    except UnicodeDecodeError:
        return None
    return Void(tenant, rest[:32] if filters & _HAS_SPACE else None, before)
