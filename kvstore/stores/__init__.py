"""State of a replica of the index: `ports.IndexStore` (ADR 10).

local        the memory of this process, and the reference
redis        a Redis or Valkey that several replicas share
address, connection   its settings; the client library, deadlines, failures
forms, view           bytes of records; trust in its nodes (pure)
scripts               steps in its own language
"""
