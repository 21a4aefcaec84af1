"""Prefixes of prompts.

prefixes      facts about a prompt, in order of their worth
rendering     tokens: engines' own, or a tokenizer's that was compared with them
process       the router's end of `child`, which makes tokens and keys in a process of its own
index_calls   the index within milliseconds; scopes of workers in it
parity        our keys against the blocks that engines store
"""
