"""State of the index that several replicas share: `ports.IndexStore` (ADR 10).

redis        a Redis or Valkey; `kvstore.index.index` is the reference, in the memory of one process
address, connection   its settings; the client library, deadlines, failures
records      bytes of records; trust in its nodes (pure)
scripts      steps in its own language
"""
