"""Where a replica of the index keeps what nodes say: `ports.IndexStore` (ADR 26).

`local.py` is the memory of this process, and the reference; `redis.py` a Redis or Valkey that
several replicas share.
"""
