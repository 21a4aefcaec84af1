"""Explanations of hits and misses, and snapshots for `kvstore inspect`.

| module     | cares about                                | in → out          |
|------------|--------------------------------------------|-------------------|
| `reasons`  | codes of misses, in one table              | –                 |
| `trail`    | the witness that keeps a bounded history   | calls → the three below |
| `tombstones` | blocks that left, why and when           | keys → stamps     |
| `findings` | results of lookups, and why not more       | LeaseAsk → ranges |
| `searches` | results of questions to other nodes        | questions → counts |
| `push_log` | pushes that have ended                    | reports → rows    |
| `explain`  | recent requests                            | Story, findings → rows |
| `report`   | snapshots for inspect                      | engine → rows     |
"""
