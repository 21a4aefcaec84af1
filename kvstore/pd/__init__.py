"""`kvstore pd-proxy`: each request to a prefill engine and a decode engine of vLLM (ADR 40).

config    addresses and rules of the proxy, checked
legs      what a request becomes on its way to either engine (pure)
engines   engines in turn, and those that are left out for a while
proxy     HTTP on both sides

A small reference of what a router does for prefill and decode. Does not cover: cached prefixes and
load, which choose no engine here; the transfer of blocks (the connector, and the nodes).
"""
