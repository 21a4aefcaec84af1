"""Prefixes of prompts.

prefixes      facts about a prompt, in order of their worth
rendering     tokens: engines' own, or a tokenizer's that was compared with them
child         a prompt's text to tokens, and tokens to keys, in a process of its own
process       queues of orders for `child`, fair by tenant
index_calls   the index within milliseconds; scopes of workers in it
parity        our keys against the blocks that engines store
"""
