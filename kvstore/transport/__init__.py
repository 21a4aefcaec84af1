"""How bytes come from arenas of other nodes: back ends behind `ports.Transport`, and their mover.

mover       the loop of a mover child: messages of the node → reads → outcomes
reads       which part of which transfer is read next (pure)
window      how much may be under way from a peer (pure)
watch       when a mover must be killed (pure)
pieces      neighbours joined, limits checked, cut into parts (pure)
backends    a back end by its name
loopback    the reference, within a process
nixl tcp ucx
"""
