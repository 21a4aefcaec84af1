"""The tiers of a node.

dram     the node's arena, shared with the engines that attach; behind the port `Memory`
hbm      a slab of a GPU's memory, with copies of blocks in dram
file/    blocks on a disk, found again after any restart
"""
