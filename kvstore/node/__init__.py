"""The node process: one loop that reads sockets, steps the engine and carries out commands.

process, node   its life; how its parts are put together
driver, turns   the loop, which carries out commands; whose turn it is, its place among threads
attach          the engines' door, its sockets, processes that were refused
files           the disk tier's end of the loop; what operators read of a full or failing disk
warm            the memory: taken over from the process before, or made
traces          spans of a request, from its story
scrub           bytes read again in the background
inspect, pages, publish   what is asked over gRPC and HTTP, and KV events over ZeroMQ
"""

import kvstore.net  # noqa: F401 -- it makes gRPC quiet, before anything imports it
