"""Steps of a shared store, in its own language: a script is atomic.

    PREFIX epoch        a random name of this state: with another, all that replicas know is void
    PREFIX nodes        set of names          PREFIX n:NODE  hash: v(ersion), body, places, gone
    PREFIX slots        hash: slot ─▶ two letters (S shown or H hidden; 1 lost blocks), record
    PREFIX lost         hash: slot that lost blocks ─▶ its scope; scope ─▶ number of such slots
    PREFIX void         set of slots to be swept out of the rows
    PREFIX counts       hash: entries, rows, evicted
    PREFIX ids          the last slot number given
    PREFIX pass         hash: void slots that the pass over the rows sweeps out, its cursor, and
                        the run id of the server that gave it
    PREFIX b:SCOPE KEY  a row: locations of the block, five bytes each: slot, mask of tiers

A slot is four bytes, a scope sixteen, a key thirty-two. Every script begins with the epoch, so that
no decision about another state is applied to this one. Order of use is the store's own
(`OBJECT IDLETIME`), which MGET and GET refresh.

Covers: the scripts. Does not cover: their callers (`redis`), forms of records (`records`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

LOST: Final = -1
"""Result of a script if the node's record has changed: another replica wrote it, or the store
forgot."""
OTHER_EPOCH: Final = -2
SAMPLES: Final = 8
"""Number of random rows of which the oldest is evicted, as Redis itself does."""
ROWS_AT_ONCE: Final = 1000
"""About as many rows are swept by one script."""
SLOTS_AT_ONCE: Final = 1024
"""Most void slots of one pass over the rows."""
_LINE: Final = struct.Struct(">IIII")


class Script(NamedTuple):
    """A script, and its SHA-1, by which the store runs it."""

    text: str
    sha: str


def _script(body: str) -> Script:
    text = f"local P, epoch = ARGV[1], ARGV[2]\n{body}"
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


_SAME_EPOCH: Final = f"if redis.call('GET', P .. 'epoch') ~= epoch then return {OTHER_EPOCH} end\n"
_SAME_RECORD: Final = f"""
local record = P .. 'n:' .. ARGV[3]
if (redis.call('HGET', record, 'v') or '') ~= ARGV[4] then return {LOST} end
"""
_COUNTS: Final = """
local counts = redis.call('HMGET', P .. 'counts', 'entries', 'rows', 'evicted')
local entries, rows, evicted = counts[1] or 0, counts[2] or 0, counts[3] or 0
local function count()
  redis.call('HSET', P .. 'counts', 'entries', entries, 'rows', rows, 'evicted', evicted)
end
-- Of what is left of a row.
local function put(name, value, size)
  entries = entries - (size - #value) / 5
  if #value == 0 then
    redis.call('DEL', name)
    rows = rows - 1
  else
    redis.call('SET', name, value)
  end
end
"""

_VOID: Final = """
local function void(slot)
  redis.call('HDEL', P .. 'slots', slot)
  redis.call('SADD', P .. 'void', slot)
  local scope = redis.call('HGET', P .. 'lost', slot)
  if not scope then return end
  redis.call('HDEL', P .. 'lost', slot)
  if redis.call('HINCRBY', P .. 'lost', scope, -1) == 0 then
    redis.call('HDEL', P .. 'lost', scope)
  end
end
"""

MATCH: Final = _script(
    _SAME_EPOCH
    + """
local base, keys = P .. 'b:' .. ARGV[3], ARGV[4]
local total = #keys / 32
local lost = redis.call('HEXISTS', P .. 'lost', ARGV[3])
local alive, count, last = {}, 0, nil
local answer = {}
local function out(id, at)
  local one = alive[id]
  local hbm, dram = one[1] or at, one[2] or at
  answer[#answer + 1] = struct.pack('>I4I4I4I4', #one.record, hbm, dram, at) .. one.record
  alive[id] = nil
  count = count - 1
end
local function narrow(value, at)
  local masks = {}
  for place = 1, #value, 5 do
    local id = string.sub(value, place, place + 3)
    masks[id] = string.byte(value, place + 4)
    local record = not last and redis.call('HGET', P .. 'slots', id)
    if record and string.sub(record, 1, 1) == 'S' then
      alive[id] = {record = record}
      count = count + 1
    end
  end
  for id, one in pairs(alive) do
    local mask = masks[id]
    if not mask then
      out(id, at)
    else
      local tier = mask % 2 == 1 and 1 or mask % 4 >= 2 and 2 or 3  -- the fastest one
      for faster = 1, tier - 1 do one[faster] = one[faster] or at end
    end
  end
end
for first = 0, total - 1, 128 do
  local names = {}
  for i = first, math.min(first + 127, total - 1) do
    names[#names + 1] = base .. string.sub(keys, i * 32 + 1, i * 32 + 32)
  end
  for j, value in ipairs(redis.call('MGET', unpack(names))) do
    value = value or ''
    if value ~= last then
      narrow(value, first + j - 1)
      last = value
      if count == 0 then return lost .. table.concat(answer) end
    end
  end
end
for id in pairs(alive) do out(id, total) end
return lost .. table.concat(answer)
"""
)
"""Arguments: scope, keys. Answer, in one string, which is read fastest (`matched`): 1 if blocks of
the scope were lost, else 0; then for each slot with the first block four numbers (length of its
record, blocks in hbm, in dram or faster, in any tier) and the record."""

WRITE: Final = _script(
    f"""{_SAME_EPOCH}{_SAME_RECORD}
redis.call('HSET', record, 'v', ARGV[5], 'body', ARGV[6])
if ARGV[7] ~= '' then redis.call('HSET', record, 'places', ARGV[7]) end
redis.call('SADD', P .. 'nodes', ARGV[3])
local most, slots_most, refused = tonumber(ARGV[8]), tonumber(ARGV[9]), 0
{_COUNTS}{_VOID}
local function find(value, slot)
  local at = 1
  while true do
    at = string.find(value, slot, at, true)
    if not at or at % 5 == 1 then return at end
    at = at + 1
  end
end
local function mark(slot, from, to, letter)
  local known = redis.call('HGET', P .. 'slots', slot)
  if known then
    known = string.sub(known, 1, from) .. letter .. string.sub(known, to)
    redis.call('HSET', P .. 'slots', slot, known)
  end
  return known
end
local function lose(slot, scope)
  if mark(slot, 1, 3, '1') and redis.call('HSETNX', P .. 'lost', slot, scope) == 1 then
    redis.call('HINCRBY', P .. 'lost', scope, 1)
  end
end
-- What was used within a second is not given up for something new; the store counts whole seconds,
-- and 1 may be the turn of one.
local function evict()
  local oldest, longest, base = nil, 1, P .. 'b:'
  for _ = 1, {SAMPLES} do
    local name = redis.call('RANDOMKEY')
    if name and string.sub(name, 1, #base) == base then
      local idle = redis.pcall('OBJECT', 'IDLETIME', name)
      if type(idle) == 'number' and idle > longest then oldest, longest = name, idle end
    end
  end
  if not oldest then return false end
  local value = redis.call('GET', oldest)
  local scope = string.sub(oldest, #base + 1, #base + 16)
  for at = 1, #value, 5 do lose(string.sub(value, at, at + 3), scope) end
  put(oldest, '', #value)
  evicted = evicted + 1
  return true
end
local function change(is_stored, slot, mask, blob)
  if is_stored and redis.call('HEXISTS', P .. 'slots', slot) == 0 then return end
  local base = P .. 'b:' .. string.sub(blob, 1, 16)
  for at = 17, #blob, 32 do
    local name = base .. string.sub(blob, at, at + 31)
    local value = redis.call('GET', name)
    local place = value and find(value, slot)
    if place then
      local had = string.byte(value, place + 4)
      local has = is_stored and bit.bor(had, mask) or bit.band(had, bit.bnot(mask))
      if has == 0 then
        put(name, string.sub(value, 1, place - 1) .. string.sub(value, place + 5), #value)
      else
        redis.call('SETRANGE', name, place + 3, string.char(has))
      end
    elseif is_stored then
      if entries + 1 > most then
        if not evict() then
          lose(slot, string.sub(blob, 1, 16))
          return
        end
        value = redis.call('GET', name)  -- while Redis saves, it may be what was evicted
      end
      -- Not APPEND or SET: what they put may be as old as an earlier call's argument (Redis 7.0).
      redis.call('SETRANGE', name, #(value or ''), slot .. string.char(mask))
      if not value then rows = rows + 1 end
      entries = entries + 1
    end
  end
end
for at = 10, #ARGV, 4 do
  local order, slot, what, blob = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  if order == 'store' or order == 'remove' then
    change(order == 'store', slot, tonumber(what), blob)
  elseif order == 'show' then
    mark(slot, 0, 2, 'S')
  elseif order == 'void' then
    void(slot)
  elseif redis.call('HLEN', P .. 'slots') < slots_most then
    redis.call('HSET', P .. 'slots', slot, what .. '0' .. blob)
  else
    refused = refused + 1
  end
end
count()
return refused
"""
)
"""Arguments: node, version, next version, body, places (or empty), most entries, most slots, then
orders of four: name, slot, tiers or state, scope and keys or record. Answer: number of slots
without room."""

POLL: Final = _script(
    f"""{_COUNTS}
if not redis.call('GET', P .. 'epoch') then redis.call('SET', P .. 'epoch', epoch) end
local answer = {{
  redis.call('GET', P .. 'epoch'),
  redis.call('SCARD', P .. 'void'),
  redis.call('GET', P .. 'ids') or 0,
  entries, rows, evicted
}}
for _, name in ipairs(redis.call('SMEMBERS', P .. 'nodes')) do
  local known = redis.call('HMGET', P .. 'n:' .. name, 'v', 'body', 'gone')
  if known[1] then answer[#answer + 1] = {{name, known[1], known[2], known[3] or ''}} end
end
return answer
"""
)
"""Argument: an epoch, which is set if there is none. Answer: epoch, void slots, last slot number,
entries, rows, evicted, then nodes."""

RENEW: Final = _script(_SAME_EPOCH + "redis.call('SET', P .. 'epoch', ARGV[3]) return 0")
"""Argument: the epoch that replaces the present one."""

GONE: Final = _script(
    _SAME_EPOCH + _SAME_RECORD + "return redis.call('HSET', record, 'gone', ARGV[4])"
)
"""Arguments: node, version. The node is in no answer until its next update, which gives its record
another version."""

FORGET: Final = _script(
    f"""{_SAME_EPOCH}{_SAME_RECORD}{_VOID}
for at = 5, #ARGV do void(ARGV[at]) end
redis.call('SREM', P .. 'nodes', ARGV[3])
return redis.call('DEL', record)
"""
)
"""Arguments: node, version, its slots. Deletes the node's record and makes its slots void."""

SWEEP: Final = _script(
    f"""{_SAME_EPOCH}{_COUNTS}
-- A script that has written goes on though the store is full: what is swept makes room.
redis.call('SREM', P .. 'void', '')
local pass = P .. 'pass'
local known = redis.call('HMGET', pass, 'slots', 'cursor', 'run')
local slots, cursor = known[1], known[2]
if not slots then slots = table.concat(redis.call('SRANDMEMBER', P .. 'void', {SLOTS_AT_ONCE})) end
if slots == '' then return 0 end
if known[3] ~= ARGV[3] then cursor = 0 end
local found = redis.call('SCAN', cursor, 'MATCH', P .. 'b:*', 'COUNT', {ROWS_AT_ONCE})
redis.call('HSET', pass, 'slots', slots, 'cursor', found[1], 'run', ARGV[3])
local void = {{}}
for at = 1, #slots, 4 do void[string.sub(slots, at, at + 3)] = true end
for _, name in ipairs(found[2]) do
  local value, left = redis.call('GET', name), {{}}
  for place = 1, #(value or ''), 5 do
    if not void[string.sub(value, place, place + 3)] then
      left[#left + 1] = string.sub(value, place, place + 4)
    end
  end
  if value and #left * 5 < #value then put(name, table.concat(left), #value) end
end
count()
if found[1] == '0' then
  for slot in pairs(void) do redis.call('SREM', P .. 'void', slot) end
  redis.call('DEL', pass)
end
return found[1]
"""
)
"""Argument: run id of the server; with a cursor of another one the pass begins again. Removes void
slots from the next rows. All replicas share a pass over the rows; at its end the void slots that
were chosen at its begin are gone. Answer: the next cursor; 0: the pass is over, or no slot is
void."""

ALL: Final = (MATCH, WRITE, POLL, RENEW, GONE, FORGET, SWEEP)


def matched(found: bytes) -> Iterator[tuple[bytes, tuple[int, int, int]]]:
    """For each slot in MATCH's answer: its two letters and record, and the numbers of blocks in
    hbm, in dram or faster, in any tier."""
    at = 1
    while at < len(found):
        size, hbm, dram, file = _LINE.unpack_from(found, at)
        at += _LINE.size + size
        yield found[at - size : at], (hbm, dram, file)
