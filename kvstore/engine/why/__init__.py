"""Why a request hit or missed, and what there is.

| module     | cares about                                | in → out          |
|------------|--------------------------------------------|-------------------|
| `findings` | what each lookup found, and why not more   | LeaseAsk → spans  |
| `explain`  | recent requests, in words                  | Story, findings → rows |
| `report`   | snapshots for inspect                      | engine → rows     |
"""
