"""Where blocks are: slots of dram, rows of blocks, what gives way to what.

| module           | cares about                                | in → out                       |
|------------------|--------------------------------------------|--------------------------------|
| `slots`          | states of slots, generations, slabs, pools | transitions → states           |
| `writers`        | who may write each slot                    | writer → slots                 |
| `pins`           | what nothing can be evicted from, and whose | leases → lease counts         |
| `processes`      | what a process may write to, whoever it says it is | grants → bytes    |
| `residency`      | which tier holds which block               | (scope, key) → row, slot, file |
| `table`          | finding rows by key, in batches            | keys → rows                    |
| `journal`        | what the next process must know; `journal_spaces`: of models | –            |
| `adoption`       | going on with a journal                    | journal → state                |
| `admission`      | credits and room for them                  | pools → free slots             |
| `quotas`         | how much is promised to whom               | owners → who gives way         |
| `policy/`        | which slot goes next, what goes to disk    | uses → victims; keys → mask    |
"""
