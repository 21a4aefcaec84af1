"""State of a replica of the index: `ports.IndexStore` (ADR 10).

local        the memory of this process, and the reference
redis        a Redis or Valkey that several replicas share
address, connection   its settings; the client library, deadlines, failures
batch, forms, view    changes of one event; bytes of records; trust in its nodes (pure)
scripts, sweeper      steps in its own language; void slots taken out of its rows
"""
