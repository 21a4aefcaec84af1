"""The world: seeded lives of machines, nodes and engines, in one process and on virtual time.

play         seeds one after the other, what was covered; `python -m tests.sim.world`
world        one life: what happens, in which order; shrink: fewer faults and steps that break it
stage        who lives in it; ground: time, chance, the story, and what parts see of their owners
pushes       requests that one engine prefills for another
machine, node, engine, rank      what lives in it; peers, index, cluster: what of a cluster
copies, disk, transfer_worker, net, slab, sockets, threads, loop   what is simulated
faults, cluster_faults, doubts   what goes wrong
heal         after the faults: all converges
parts        numbers and sizes that the others share
"""
