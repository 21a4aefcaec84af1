"""Explanations of hits and misses, and snapshots for `kvstore inspect`.

| module     | cares about                                | in → out          |
|------------|--------------------------------------------|-------------------|
| `reasons`  | codes of misses, in one table              | –                 |
| `trail`    | reports of moves, in a bounded history     | calls → those below |
| `tombstones` | blocks that left, why and when           | keys → stamps     |
| `findings` | results of lookups, and why not more       | LeaseAsk → ranges |
| `searches` | results of questions to other nodes        | questions → counts |
| `explain`  | recent requests                            | Story, findings → rows |
| `ages`     | time since the last use of evicted blocks  | order, time → counts |
| `curve`    | hits with dram of other sizes              | lookups → ratios  |
| `ledger`   | sums over all requests                     | Story, rows → counts |
| `hottest`  | blocks used last                           | engine → keys     |
| `report`   | snapshots for inspect                      | engine → rows     |
"""
