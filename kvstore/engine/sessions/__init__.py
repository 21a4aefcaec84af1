"""Attached engines, their lookups and their leases.

| module      | cares about                                   | in → out                     |
|-------------|-----------------------------------------------|------------------------------|
| `owners`    | attached engines, and whether their parts fit | Hellos → owner, objection    |
| `sessions`  | attaching, sessions, return of slots          | Hellos, ends → Quiesce, open |
| `lookups`   | blocks that a request can load                | LeaseAsk, Hint → replies     |
| `prepares`  | blocks that a router wants before an engine   | PrepareBlocks → counts       |
| `leases`    | slots pinned for readers                      | leases → lease counts        |
| `awaited`   | requests that wait for blocks of prefill nodes | PushExpect → PushEnd        |
| `askers`    | engines and nodes that blocks are brought for | owner → shards, quota        |
| `unserved`  | engines that get nothing, and why             | objections → rows            |
"""
