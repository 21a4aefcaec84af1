"""A replica of the index, by itself or inside a node.

replica   its socket, its pages, its process
service   feeds in, answers out, over gRPC
shares    limits of one caller
twins     two processes with the name of one node
"""

import kvstore.net  # noqa: F401 -- it makes gRPC quiet, before anything imports it
