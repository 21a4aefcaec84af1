"""A replica of the index, by itself or inside a node.

replica   its socket, its pages, its process
service   feeds in, answers out, over gRPC
shares    limits of one caller
"""

import kvstore.net  # noqa: F401 -- it makes gRPC quiet, before anything imports it
