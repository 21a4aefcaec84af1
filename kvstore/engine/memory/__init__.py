"""Places of blocks: slots of dram, rows of blocks, evictions.

| module           | cares about                                | in → out                       |
|------------------|--------------------------------------------|--------------------------------|
| `slots`          | states, generations and writers of slots   | transitions → states           |
| `shares`         | quotas, pins; enforced in `moves.intake`   | owners, leases → room          |
| `policies`       | which blocks leave next (`pop`)            | uses → victims                 |
| `residency`      | tiers of each block, runs in dram, offers  | (scope, key) → row, slot, file |
| `table`          | finding rows by key, in batches            | keys → rows                    |
| `journal`        | state and spaces for the next process      | –                              |
"""
