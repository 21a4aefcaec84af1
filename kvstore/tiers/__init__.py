"""Mechanisms behind the `Memory` port: memory that holds slots.

dram     the node's arena, shared with the engines that attach
memory   the reference, as obvious as can be
file/    blocks on a disk, found again after any restart
scrub    how fast a background scrub reads: arithmetic only
"""
