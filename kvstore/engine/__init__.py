"""The pure engine of a node: events in, commands out.

| module          | cares about                                | in → out                       |
|-----------------|--------------------------------------------|--------------------------------|
| `events.py`     | the values that go in and come out         | –                              |
| `engine.py`     | dispatch, and what concerns all blocks     | events → commands              |
| `sessions.py`   | attaching, sessions, whose slots come back | Hellos, ends → Quiesce, open   |
| `stores.py`     | credits out, seals in                      | Seal, Drop → Grant             |
| `lookups.py`    | what can be loaded                         | LeaseAsk, Hint → replies       |
| `files.py`      | what comes from disk, who waits for it     | keys → ReadFile, LeaseMore     |
| `writes.py`     | what is written through to disk            | rows → WriteFile               |
| `state.py`      | what those parts share                     | –                              |
| `owners.py`     | who is attached, and whether it fits       | Hellos → owner, objection      |
| `slots.py`      | states of slots, generations, slabs, pools | transitions → states           |
| `residency.py`  | which tier holds which block               | (scope, key) → row, slot, file |
| `table.py`      | finding rows by key, in batches            | keys → rows                    |
| `leases.py`     | what readers were promised                 | leases → lease counts          |
| `admission.py`  | credits and room for them                  | pools → free slots             |
| `policy/`       | which slot goes next, what goes to disk    | uses → victims; keys → mask    |
| `counters.py`   | counts for /metrics                        | –                              |
| `tombstones.py` | why blocks left, in bounds                 | rows that go → stamps          |
| `findings.py`   | what each lookup found, and why not more   | LeaseAsk → spans               |
| `explain.py`    | recent requests, in words                  | Story, findings → rows         |
| `report.py`     | snapshots for inspect                      | engine → rows                  |
| `check.py`      | what must be true between two steps        | engine → nothing, or an error  |

A new policy goes beside `policy/lru.py`; a new message is dispatched in `engine.py`.
"""
