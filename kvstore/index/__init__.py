"""The global prefix index (pure): who holds which block, by what nodes say of themselves.

`index.py` is the whole, `feed.py` decides what is believed of a node, `holdings.py` keeps who holds
what, `chain.py` computes, from tokens, what engines call their blocks.
"""
