"""What several kinds of tests share: actors that can be killed, what processes hold, networks.

actor, troupe   a scheduler or rank as a process of its own; who tells them what
kills, host, trips, garbage   cycles of kills, of round trips, of broken input
gauges          descriptors, memory, children of a node
lan, peers      network namespaces; nodes as neighbours in them
engine_publisher   KV events as vLLM publishes them
simulated_device   a GPU at its worst, without one
memory_tier, memory_store   references of the ports for memory and disk
redis_process   a Redis as a child
prompts         prompts that meet the edges of block caching
"""
