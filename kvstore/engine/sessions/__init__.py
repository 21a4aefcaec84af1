"""Who is attached, what he asks, and what he was promised.

| module      | cares about                                   | in → out                     |
|-------------|-----------------------------------------------|------------------------------|
| `owners`    | who is attached, and whether it fits          | Hellos → owner, objection    |
| `sessions`  | attaching, sessions, whose slots come back    | Hellos, ends → Quiesce, open |
| `lookups`   | what can be loaded                            | LeaseAsk, Hint → replies     |
| `runs`      | the longest run of a chain in dram            | keys → slots                 |
| `leases`    | what readers were promised                    | leases → lease counts        |
| `askers`    | for whom blocks are brought                   | owner → shards, quota        |
| `unserved`  | engines that get nothing, and why             | objections → rows            |
"""
