"""How bytes come from arenas of other nodes: back ends behind `ports.Transport`, and the
process in which they run.

transfer_worker   the loop of that process: messages of the node → transfers → outcomes; page tables
reads       which part of which transfer is moved next, and how much may be under way (pure)
pieces      neighbours joined, limits checked, cut into parts; base of back ends (pure)
backends    a back end by its name
nixl tcp ucx   the back ends
guests      who of those that dial in may stay (pure)
"""
