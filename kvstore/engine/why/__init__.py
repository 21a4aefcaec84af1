"""Why a request hit or missed, and what there is.

| module     | cares about                                | in → out          |
|------------|--------------------------------------------|-------------------|
| `reasons`  | codes of misses, in one table              | –                 |
| `trail`    | the witness, as long as it remembers       | calls → the three below |
| `tombstones` | blocks that left, why and when           | keys → stamps     |
| `findings` | what each lookup found, and why not more   | LeaseAsk → ranges |
| `searches` | what became of asking other nodes          | questions → counts |
| `explain`  | recent requests                            | Story, findings → rows |
| `report`   | snapshots for inspect                      | engine → rows     |
"""
