"""A node's exchange with other nodes, on an asyncio loop of its own.

member          its part in a cluster: all that follows
changes         changes of its blocks, logged for all that publish them
feed            its offers, published to every replica of the index
`peering`, `fetcher`, `block_server`, `peer_session`   blocks from others, and for others
preparer        blocks that routers want in dram ahead of time
drain           blocks that go to others when this node leaves
`lander`, `pusher`   blocks that others push here, and that are pushed to others
stages          durations of their stages, and warnings
exchange        between this loop and the node's
`transfer_worker`, `transfer_worker_process`   the child that moves bytes
engine_memory   KV events of engines: blocks in their own memory
"""

import kvstore.net  # noqa: F401 -- it makes gRPC quiet, before anything imports it
