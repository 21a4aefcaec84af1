"""Blocks that come to dram and leave it.

| module     | cares about                                     | in → out                 |
|------------|-------------------------------------------------|--------------------------|
| `intake`   | every block that comes into dram, room for it   | copies → rows, seals     |
| `jobs`     | transfers under way: how much, how long         | times → estimate         |
| `stores`   | credits out, seals in; bad copies leave         | Seal, Drop, Distrust → Grant |
| `files`    | promotions from disk, places on disk            | keys → ReadFile, LeaseMore |
| `writes`   | blocks that are written through to disk         | rows → WriteFile         |
| `fetches`  | blocks from other nodes                         | keys → Locate, Fetch     |
| `servings` | blocks that other nodes read here               | ServeAsk → ServeAnswer   |
| `hbm`      | copies of blocks in a GPU's memory              | leases → Promote, Shown  |
| `pushes`   | blocks that are written to other nodes          | PushGrant → WritePush, Pushed  |
| `grants`   | blocks that other nodes write here              | room → AskPush, Land     |
| `arrivals` | leases that grow while blocks arrive            | blocks → LeaseMore       |
"""
