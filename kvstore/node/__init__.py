"""The node process: one loop that reads sockets, steps the engine and carries out commands.

process, node   its life; how its parts are put together
driver, executor, priority   the loop; commands to tiers; its place among other threads
attach, connection  the engines' door, one socket of it, processes that were refused
files, late     the disk tier's end of the loop; a directory that cannot be opened yet
warm            the memory: taken over from the process before, or made
traces          spans of a request, from its story
scrub, passes   bytes read again in the background; what that says in the log
inspect, pages, publish   what is asked over gRPC and HTTP, and KV events over ZeroMQ
"""

import kvstore.net  # noqa: F401 -- it makes gRPC quiet, before anything imports it
