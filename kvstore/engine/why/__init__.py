"""Explanations of hits and misses, and snapshots for `kvstore inspect`.

| module     | cares about                                | in → out          |
|------------|--------------------------------------------|-------------------|
| `reasons`  | codes of misses, tombstones, searches, values of reports | –   |
| `findings` | results of lookups, and why not more; the trail of reports | LeaseAsk → ranges |
| `explain`  | recent requests                            | Story, findings → rows |
| `curve`    | hits with dram of other sizes, ages of evictions | lookups → ratios |
| `ledger`   | sums over all requests                     | Story, rows → counts |
| `report`   | snapshots for inspect, blocks used last    | engine → rows     |
"""
