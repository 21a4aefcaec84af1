"""The pure part of a connector: lookups, loads, stores and fences, without engine types.

| module          | cares about                                  | in → out                      |
|-----------------|----------------------------------------------|-------------------------------|
| `plan.py`       | the values that scheduler and ranks exchange, counters | –                   |
| `config.py`     | limits and names                             | –                             |
| `dial.py`       | back-off, late greetings, heartbeats         | times → connect, hang up      |
| `attachment.py` | the scheduler's session and credits          | datagrams → state, credits    |
| `hits.py`       | lengths of hits, the port of their rules     | –                             |
| `loads.py`      | known blocks, leased blocks as jobs          | answers → HitPlan, LoadJob    |
| `pushes.py`     | transfers from prefill to decode             | requests ↔ datagrams          |
| `request.py`    | a request under way, its story               | –                             |
| `lookups.py`    | leases and loads                             | keys → hit, miss, pending     |
| `stores.py`     | which filled blocks go where, fences         | full blocks, credits → StoreJob |
| `scheduler.py`  | joins them for one engine                    | requests → StepPlan           |
| `costs.py`      | load or compute                              | times → worth it or not       |
| `waits.py`      | how long to wait for blocks on their way     | arrivals → patience           |
| `pace.py`       | cost of computing and copying on this engine | times → estimates             |
| `shadow.py`     | shadow checks                                | hits → some of them           |
| `copies.py`     | one running job of a rank                    | arrays → block copies         |
| `rank.py`       | the jobs of one rank                         | StepPlan, datagrams → copies  |
"""
