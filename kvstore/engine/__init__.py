"""The pure engine of a node: events in, commands out.

| room        | cares about                                       | in → out                    |
|-------------|---------------------------------------------------|-----------------------------|
| `engine`    | dispatch, operations on all blocks                | events → commands           |
| `events`    | the values that go in and come out                | –                           |
| `agenda`    | what is looked at when: by time, by name          | –                           |
| `config`    | sizes and limits of one node                      | –                           |
| `state`     | tables that the rooms share, counts for /metrics | –                       |
| `memory/`   | slots, tiers of each block, eviction              | transitions → states        |
| `sessions/` | attached engines, their lookups and leases        | Hellos, asks → replies      |
| `moves/`    | blocks that come to dram and leave it             | seals, ends → reads, writes |
| `trust`     | scrubs, and spaces that are switched off          | findings → counts, off, on  |
| `why/`      | results of lookups, stories, snapshots            | engine → rows               |

Other packages import only `engine`, `events`, `memory.journal`, `sessions.owners`, `trust` and
`why`, by a contract of pyproject.toml. `kvstore explain` needs rows and loads no engine.

A new policy goes into `memory/policies.py`; a new message is dispatched in `engine.py`.
"""
