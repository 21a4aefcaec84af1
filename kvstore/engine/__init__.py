"""The pure engine of a node: events in, commands out.

| room        | cares about                                       | in → out                    |
|-------------|---------------------------------------------------|-----------------------------|
| `engine`    | dispatch, and what concerns all blocks            | events → commands           |
| `events`    | the values that go in and come out                | –                           |
| `state`     | what the rooms share; `counters`: for /metrics    | –                           |
| `check`     | what must be true between two steps               | engine → nothing, or an error |
| `memory/`   | slots, which tier holds which block, what to keep | transitions → states        |
| `sessions/` | who is attached, what he asks and was promised    | Hellos, asks → replies      |
| `moves/`    | blocks that come to dram and leave it             | seals, ends → reads, writes |
| `trust/`    | what is verified again, what is switched off      | –                           |
| `why/`      | what lookups found, stories, snapshots            | engine → rows               |

A new policy goes beside `memory/policy/lru.py`; a new message is dispatched in `engine.py`.
"""
