"""Where a replica of the index keeps what nodes say: `ports.IndexStore` (ADR 26).

local        the memory of this process, and the reference
redis        a Redis or Valkey that several replicas share
address, connection   as an operator writes it; the way there, deadlines, whether it is there
batch, forms, view    what one event changes; what is kept, as bytes; what nodes it tells of (pure)
scripts, sweeper      what it does in its own language; void slots taken out of its rows
"""
