"""The global prefix index (pure): which node holds which block, as published by the nodes.

index       the whole: how much of a prompt each holder has
chain       from tokens, what engines call their blocks
feed        trust in a node; two nodes with one name; its messages as orders about blocks
engine_feed   the same of an engine's own memory
holdings    holders of blocks: flat memory, fixed at the start
loops       loops over that memory, plain or compiled
"""
