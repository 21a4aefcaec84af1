"""Helpers for tests of others: real processes, an engine without vLLM, contract suites.

| module                                      | content                                           |
|---------------------------------------------|---------------------------------------------------|
| `process`, `index_process`                  | a node, an index as children                      |
| `router_process`                            | a router as a child                               |
| `tied`                                      | children that end with this process               |
| `raw_engine`                                | an engine driven by hand, over the real sockets   |
| `transports`, `transport_parties`           | the contract of `ports.Transport`, as checks      |
| `indexer`                                   | the pattern of an indexer that follows KV events  |
"""
