"""A node's exchange with other nodes, on an asyncio loop of its own.

member          its part in a cluster: all that follows, put together; commands and events between
                this loop and the node's
changes         changes of its blocks, logged for all that publish them
feed            its offers, published to every replica of the index
fetcher         where blocks are, and their bytes, verified
peer_session    sessions with other nodes, both ends: asking and serving
pushes          blocks that are pushed to others, and that others push here; durations, and warnings
preparer        blocks that routers want in dram ahead of time, and those of a node that leaves
`transfer_worker`, `transfer_worker_process`   the child that moves bytes
engine_memory   KV events of engines: blocks in their own memory
"""

import kvstore.net  # noqa: F401 -- it makes gRPC quiet, before anything imports it
