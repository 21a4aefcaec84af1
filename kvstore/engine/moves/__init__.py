"""Blocks that come to dram and leave it.

| module     | cares about                                     | in → out                 |
|------------|-------------------------------------------------|--------------------------|
| `intake`   | every block that comes into dram, however       | copies → rows, seals     |
| `jobs`     | transfers under way, how much may be in motion  | –                        |
| `stores`   | credits out, seals in                           | Seal, Drop → Grant       |
| `files`    | what comes from disk, who waits for it          | keys → ReadFile, LeaseMore |
| `writes`   | what is written through to disk                 | rows → WriteFile         |
| `fetches`  | what comes from other nodes                     | keys → Locate, Fetch     |
| `loans`    | what other nodes read here                      | Lend → Lent              |
| `offers`   | what they can have: whole blocks                | changes → keys           |
| `covers`   | which shards make one                           | –                        |
| `arrivals` | leases that grow while blocks arrive            | blocks → LeaseMore       |
| `pace`     | how long disk and peers take                    | times → estimate         |
| `paces`    | what engines said of themselves                 | –                        |
"""
