"""The global prefix index (pure): who holds which block, by what nodes say of themselves.

index       the whole: which holder has how much of a prompt
chain       from tokens, what engines call their blocks
feed        how far a node is believed; places: what it said, as orders; rivals: two with one name
engine_feed, engine_blocks   the same of an engine's own memory
holdings    who holds what: flat memory, fixed at the start
fields, loops, rows, sets, native   where its numbers lie; loops over them, plain or compiled
check       what must be true between two calls
"""
