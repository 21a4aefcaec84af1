"""Explanations of hits and misses, and snapshots for `kvstore inspect`.

| module     | cares about                                | in → out          |
|------------|--------------------------------------------|-------------------|
| `reasons`  | codes of misses, tombstones, values of reports | –             |
| `trail`    | reports of moves, in a bounded history     | calls → those below |
| `findings` | results of lookups and searches, and why not more | LeaseAsk → ranges |
| `explain`  | recent requests                            | Story, findings → rows |
| `curve`    | hits with dram of other sizes, ages of evictions | lookups → ratios |
| `ledger`   | sums over all requests                     | Story, rows → counts |
| `report`   | snapshots for inspect, blocks used last    | engine → rows     |
"""
