"""Helpers for demos, benchmarks and tests: real processes.

| module                                      | content                                           |
|---------------------------------------------|---------------------------------------------------|
| `process`                                   | a node, a router, certificates; any tied child    |
| `tied`                                      | the program that ties a child to its parent       |
"""
