"""What others can test with: real processes, an engine without vLLM, contract suites.

process, index_process, redis_process   a node, an index, a Redis as children; tied: that end with us
raw_engine   an engine that is driven by hand, over the real sockets
transports   what every `ports.Transport` promises, as checks
indexer      the pattern of an outside indexer that follows KV events
"""
