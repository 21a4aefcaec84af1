"""Attached engines, their lookups and their leases.

| module      | cares about                                   | in → out                         |
|-------------|-----------------------------------------------|----------------------------------|
| `owners`    | attached engines: parts, fit, who is unserved | Hellos → owner, objection        |
| `sessions`  | attaching, sessions, return of slots          | Hellos, ends → Quiesce, open     |
| `lookups`   | blocks that a request can load, or will name  | LeaseAsk, Hint, Prepare → replies |
| `leases`    | slots pinned for readers                      | leases → lease counts            |
| `awaited`   | requests that wait for pushed blocks          | PushExpect → PushEnd             |
"""
