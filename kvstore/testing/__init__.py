"""Helpers for tests of others: real processes, and an engine without vLLM.

| module                                      | content                                           |
|---------------------------------------------|---------------------------------------------------|
| `process`                                   | a node, an index, a router as children            |
| `tied`                                      | children that end with this process               |
| `raw_engine`                                | an engine driven by hand, over the real sockets   |
"""
