"""Places of blocks: slots of dram, rows of blocks, evictions.

| module           | cares about                                | in → out                       |
|------------------|--------------------------------------------|--------------------------------|
| `slots`          | states, generations and writers of slots   | transitions → states           |
| `pins`           | protection against eviction, by account    | leases → lease counts          |
| `residency`      | tiers of each block                        | (scope, key) → row, slot, file |
| `table`          | finding rows by key, in batches            | keys → rows                    |
| `journal`        | state for the next process; `journal_spaces`: models | –                    |
| `adoption`       | going on with a journal                    | journal → state                |
| `admission`      | credits and room for them                  | pools → free slots             |
| `quotas`         | guaranteed shares of dram                  | owners → order of eviction     |
| `policy/`        | next victims, blocks for the disk          | uses → victims; keys → mask    |
"""
