"""Helpers for tests of others: real processes, and an engine without vLLM.

| module                                      | content                                           |
|---------------------------------------------|---------------------------------------------------|
| `process`                                   | a node, a router, certificates; any tied child    |
| `tied`                                      | the program that ties a child to its parent       |
| `raw_engine`                                | an engine driven by hand, over the real sockets   |
"""
