"""The pure part of a connector: lookups, loads, stores and fences, without engine types.

| module          | cares about                                  | in → out                        |
|-----------------|----------------------------------------------|---------------------------------|
| `plan.py`       | values of connector, scheduler, ranks: configuration, hits, plans, reports | – |
| `attachment.py` | back-off, heartbeats; session and credits of the scheduler | datagrams → state |
| `request.py`    | a request under way, its leased blocks, its story | answers → LoadJob, Story   |
| `pushes.py`     | transfers from prefill to decode             | requests ↔ datagrams            |
| `lookups.py`    | leases and loads                             | keys → hit, miss, pending       |
| `stores.py`     | which filled blocks go where, fences         | full blocks, credits → StoreJob |
| `scheduler.py`  | joins them for one engine                    | requests → StepPlan             |
| `costs.py`      | load or compute; waits for blocks on their way | times → worth it or not       |
| `shadow.py`     | shadow checks                                | hits → some of them             |
| `rank.py`       | the jobs of one rank, and their copies       | StepPlan, datagrams → copies    |
"""
