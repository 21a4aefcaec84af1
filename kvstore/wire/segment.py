"""A segment: the file that records are appended to, and the table that closes it.

    page 0          segment header: magic KVSS, version, flags, store id, segment id, number
    page 1 …        records (`record.py`), one behind the other
    closed only:    footer table, padded to whole pages, then the trailer page at the very end

The footer table names each scope once, then has one column per field, so that numpy reads a million
records without touching one of them:

    scopes   per scope   u32 length, prefix              voids   per void   one record page each
    columns  page u32[n]   scope u32[n]   key 32[n]   checksum 16[n]

The trailer (magic KVSF) repeats segment id and number and says where the table is, how long its
parts are, and its xxh3-128. Header and trailer carry their own checksum at offset 4080, and so does
the page (magic KVSD) that gives a directory its identity. Flag 1 of a header: the segment before it
was closed, so that one without a footer was not left like that.

Ways to be broken: shorter than two pages; no whole number of pages; header of another version,
store, number or checksum; trailer absent, torn, of another segment, or pointing outside the file;
table checksum that differs; counts that do not fill the table; a scope that does not parse; records
out of order, overlapping, or reaching into the table. A segment whose header stands but whose
footer does not is read record by record.

Does not cover: files, directories, who may append (`kvstore.tiers.file`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.types import PAGE_BYTES
from kvstore.wire import record
from kvstore.wire.bounds import U32, U64, Checksum, Id

SEGMENT_VERSION: Final = 2
PAGE_SHIFT: Final = 32
SEGMENT_BYTES_LIMIT: Final = 1 << 30
"""A file longer than this is no segment of ours, whatever it says."""
_AsMany = msgspec.Meta(max_length=SEGMENT_BYTES_LIMIT // PAGE_BYTES)
"""Bound of lists: no file has pages for more elements."""
ID_BYTES: Final = 16

_HEAD = struct.Struct("<4sHH16s16sI")
_TRAILER = struct.Struct("<4sHH16sIIIIIQ16s")
_STORE = struct.Struct("<4sHH16s")
_FOLLOWS_CLOSED: Final = 1
_SEGMENT_MAGIC, _TRAILER_MAGIC, _STORE_MAGIC = b"KVSS", b"KVSF", b"KVSD"
_COLUMNS: Final = {"page": "<u4", "scope": "<u4", "key": "V32", "checksum": "V16"}
ROW: Final = np.dtype([*_COLUMNS.items()])
"""A record in the table, which a footer has column by column."""


def place_of(number: int, page: int) -> int:
    """Location of the record at a page of segment `number`: never 0, since page 0 is the segment's
    header."""
    return number << PAGE_SHIFT | page


class SegmentHead(msgspec.Struct, frozen=True):
    """Content of page 0."""

    store_id: Id
    segment_id: Id
    number: U32
    follows_closed: bool = False
    """The segment with the number before this one had its footer when this one was begun."""


class Table(msgspec.Struct, frozen=True):
    """Records of one segment. `rows`: of `ROW` [n], ascending by page; `scope` indexes
    `scopes`."""

    scopes: Annotated[tuple[record.Scope, ...], _AsMany]
    voids: Annotated[tuple[record.Void, ...], _AsMany]
    rows: Any

    def block(self, row: int) -> record.BlockPage:
        _, scope, key, checksum = self.rows[row]
        return record.BlockPage(self.scopes[int(scope)], key.tobytes(), checksum.tobytes())

    def living(self, number: int, voids: Sequence[record.Void]) -> NDArray[np.bool_]:
        """Which records no void covers, of this table or of `voids`; bool [n]."""
        alive = np.ones(len(self.rows), np.bool_)
        places = self.rows["page"].astype(np.uint64) | np.uint64(number << PAGE_SHIFT)
        for void in (*self.voids, *voids):
            meant = np.array([void.covers(scope) for scope in self.scopes], np.bool_)
            if meant.any():
                alive &= ~(meant[self.rows["scope"]] & (places < np.uint64(void.before)))
        return alive


@dataclass
class Gathered:
    """Records that were found one by one, and the page behind the last one."""

    scopes: dict[record.Scope, int] = field(default_factory=dict)
    voids: list[record.Void] = field(default_factory=list)
    rows: list[bytes] = field(default_factory=list)
    """Each in the form of `ROW`."""
    end_page: int = 1

    @property
    def has_records(self) -> bool:
        """Whether there is a block or a void."""
        return bool(self.rows or self.voids)

    def add(self, page: int, scope: record.Scope, key: bytes, checksum: bytes) -> None:
        number = self.scopes.setdefault(scope, len(self.scopes))
        self.rows.append(struct.pack("<II", page, number) + key + checksum)

    def table(self) -> Table:
        """Records found so far; from any thread, while another one adds."""
        rows = np.frombuffer(b"".join(self.rows), ROW)  # first: `add` puts the scope before the row
        return Table(tuple(self.scopes), tuple(self.voids), rows)


def store_page(store_id: bytes) -> bytes:
    """The page that gives a directory its identity."""
    return _sealed(_STORE, _STORE_MAGIC, 0, store_id)


def parse_store_page(page: bytes) -> bytes | None:
    """The identity of a directory, or None: broken, or of another version."""
    fields = _unsealed(page, _STORE, _STORE_MAGIC)
    return fields[1] if fields else None


def segment_page(head: SegmentHead) -> bytes:
    """Page 0 of a segment."""
    flags = _FOLLOWS_CLOSED if head.follows_closed else 0
    return _sealed(_HEAD, _SEGMENT_MAGIC, flags, head.store_id, head.segment_id, head.number)


def parse_segment_page(page: bytes) -> SegmentHead | None:
    """Content of page 0, or None: broken, or of another version."""
    fields = _unsealed(page, _HEAD, _SEGMENT_MAGIC)
    if not fields:
        return None
    flags, store_id, segment_id, number = fields
    return SegmentHead(store_id, segment_id, number, bool(flags & _FOLLOWS_CLOSED))


def footer_bytes_max(*, record_count: int, scope_count: int, void_count: int) -> int:
    """Most bytes of a footer with these numbers of entries, its trailer included."""
    table = record_count * ROW.itemsize + scope_count * 512 + void_count * PAGE_BYTES
    return -(-table // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES


def footer(head: SegmentHead, table: Table, *, first_page: int) -> bytes:
    """Footer and trailer that close a segment whose records end before `first_page`."""
    prefixes = [scope.prefix() for scope in table.scopes]
    parts = [struct.pack("<I", len(prefix)) + prefix for prefix in prefixes]
    scope_bytes = sum(map(len, parts))
    parts += [record.void_page(void, segment_id=head.segment_id, place=0) for void in table.voids]
    parts += [table.rows[name].tobytes() for name in _COLUMNS]
    body = b"".join(parts)
    sizes = len(table.rows), len(table.scopes), len(table.voids), scope_bytes
    place = first_page, *sizes, xxhash.xxh3_128_digest(body)
    trailer = _sealed(_TRAILER, _TRAILER_MAGIC, 0, head.segment_id, head.number, *place)
    return body + bytes(-len(body) % PAGE_BYTES) + trailer


class FooterPlace(msgspec.Struct, frozen=True):
    """Place of the table in a closed segment, and sizes of its parts."""

    first_page: U32
    record_count: U32
    scope_count: U32
    void_count: U32
    scope_bytes: U64
    checksum: Checksum

    @property
    def table_bytes(self) -> int:
        return self.scope_bytes + self.void_count * PAGE_BYTES + self.record_count * ROW.itemsize


def parse_trailer(page: bytes, head: SegmentHead, *, file_bytes: int) -> FooterPlace | None:
    """Place of the table of this segment; None if it has no trailer that can be trusted."""
    fields = _unsealed(page, _TRAILER, _TRAILER_MAGIC)
    if not fields:
        return None
    _, segment_id, number, *rest = fields
    place = FooterPlace(*rest)
    if segment_id != head.segment_id or number != head.number or place.scope_bytes > file_bytes:
        return None
    table_pages = -(-place.table_bytes // PAGE_BYTES)
    if place.first_page < 1 or (place.first_page + table_pages + 1) * PAGE_BYTES != file_bytes:
        return None
    return place


def parse_footer(body: bytes, place: FooterPlace, head: SegmentHead) -> Table | None:
    """The table, `body` being its `table_bytes`; None: broken in any way."""
    if len(body) != place.table_bytes or xxhash.xxh3_128_digest(body) != place.checksum:
        return None
    scopes = _parse_scopes(body[: place.scope_bytes], place.scope_count)
    if scopes is None:
        return None
    at = place.scope_bytes
    voids = []
    for _ in range(place.void_count):
        void = record.parse_page(body[at : at + PAGE_BYTES], segment_id=head.segment_id, place=0)
        if not isinstance(void, record.Void):
            return None
        voids.append(void)
        at += PAGE_BYTES
    rows = np.empty(place.record_count, ROW)
    for name in _COLUMNS:
        rows[name] = np.frombuffer(body, ROW[name], len(rows), at)
        at += rows[name].nbytes
    table = Table(scopes, tuple(voids), rows)
    return table if _fits(table, place.first_page) else None


def _parse_scopes(body: bytes, count: int) -> tuple[record.Scope, ...] | None:
    scopes, at = [], 0
    for _ in range(count):
        if at + 4 > len(body):
            return None
        (length,) = struct.unpack_from("<I", body, at)
        scope = record.parse_prefix(body[at + 4 : at + 4 + length])
        if scope is None:
            return None
        scopes.append(scope)
        at += 4 + length
    return tuple(scopes) if at == len(body) else None


def _fits(table: Table, end_page: int) -> bool:
    """Whether the records are in order, and none overlaps the next one or the table."""
    if not len(table.rows):
        return True
    if int(table.rows["scope"].max()) >= len(table.scopes):
        return False
    lengths = np.array([record.record_pages(scope) for scope in table.scopes], np.int64)
    begins = table.rows["page"].astype(np.int64)
    ends = begins + lengths[table.rows["scope"]]
    return bool(begins[0] >= 1 and (ends[:-1] <= begins[1:]).all() and ends[-1] <= end_page)


def _sealed(form: struct.Struct, magic: bytes, *fields: Any) -> bytes:
    """A page of these fields behind magic and version."""
    page = bytearray(PAGE_BYTES)
    form.pack_into(page, 0, magic, SEGMENT_VERSION, *fields)
    page[record.PAGE_COVERED :] = record.seal_page(page)
    return bytes(page)


def _unsealed(page: bytes, form: struct.Struct, magic: bytes) -> list[Any] | None:
    """The fields of `_sealed`, or None: broken, or of another version."""
    if not record.page_is_whole(page):
        return None
    found, version, *fields = form.unpack_from(page)
    return fields if (found, version) == (magic, SEGMENT_VERSION) else None
