"""Mechanisms behind the `Memory` port: memory for slots.

dram     the node's arena, shared with the engines that attach
memory   the reference, as obvious as can be
file/    blocks on a disk, found again after any restart
scrub    rate of a background scrub: arithmetic only
"""
