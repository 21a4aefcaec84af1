"""Helpers for tests of others: real processes, and an engine without vLLM.

| module                                      | content                                           |
|---------------------------------------------|---------------------------------------------------|
| `process`, `index_process`                  | a node, an index as children                      |
| `router_process`                            | a router as a child                               |
| `tied`                                      | children that end with this process               |
| `raw_engine`                                | an engine driven by hand, over the real sockets   |
"""
