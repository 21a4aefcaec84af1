"""What several kinds of tests share: actors that can be killed, what processes hold, networks.

actor, troupe   a scheduler or rank as a process of its own; who tells them what
kills, host, trips, garbage   cycles of kills, of round trips, of broken input
gauges          descriptors, memory, children of a node
lan, peers      network namespaces; nodes as neighbours in them
command         `kvstore` as users type it
engine_publisher   KV events as vLLM publishes them
event_indexer   an indexer outside of kvstore, which follows KV events of a node
index_check     what is true of an index between two calls
transport_checks   the contract of `ports.Transport`, as checks
transport_parties   transports with an arena of their own, for the contract of `ports.Transport`
simulated_device   a GPU at its worst, without one
memory_tier, memory_store   references of the ports for memory and disk
redis_process   a Redis as a child
engines, models   settings of vLLM and sizes of models that the demo does not need
pd_pair         a prefill engine and a decode engine on nodes of their own, and a router
sensitivity     does a damaged block show in a model's output
serving         whether an engine's side asks its node
prompts         prompts that meet the edges of block caching
"""
