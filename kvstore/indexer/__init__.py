"""A replica of the index, by itself or inside a node.

replica   its socket, its pages, its process
service   feeds in, answers out, over gRPC
shares    how much of it one caller may have
twins     two processes that say they are one node
"""

import kvstore.net  # noqa: F401 -- it makes gRPC quiet, before anything imports it
