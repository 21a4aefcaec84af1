"""Blocks that come to dram and leave it.

| module     | cares about                                     | in → out                 |
|------------|-------------------------------------------------|--------------------------|
| `intake`   | every block that comes into dram                | copies → rows, seals     |
| `jobs`     | transfers under way, how much may be in motion  | –                        |
| `stores`   | credits out, seals in                           | Seal, Drop → Grant       |
| `files`    | promotions from disk, places on disk            | keys → ReadFile, LeaseMore |
| `read_queue` | the queue for the disk                          | –                        |
| `writes`   | blocks that are written through to disk         | rows → WriteFile         |
| `fetches`  | blocks from other nodes                         | keys → Locate, Fetch     |
| `servings` | blocks that other nodes read here               | Serve → ServeAnswer      |
| `hbm`      | copies of blocks in a GPU's memory              | leases → Promote, Shown  |
| `transfers` | requests that engines here prefill for others | PushOpen, PushClose → patience |
| `pushes`   | blocks that are written to other nodes          | PushAsked → WritePush, Pushed  |
| `grants`   | blocks that other nodes write here              | room → AskPush, Land     |
| `expected` | limits and turns of these requests, their keys   | –                        |
| `landing`  | room for these                                  | –                        |
| `arrivals` | leases that grow while blocks arrive            | blocks → LeaseMore       |
| `pace`     | how long disk and peers take                    | times → estimate         |
"""
