"""`kvstore demo`: a real vLLM without and with kvstore, and the means to start one.

flags, play, cluster, pd   command line; one node; two nodes as one cache; prefill and decode
router                 two engines behind the router, beside round robin
models, workload       small models on this machine; conversations and prompts
engine, engine_config, guard   a vLLM server as a child that leaves no process behind
completions            a client of it, or of a proxy
pair                   a prefill and a decode engine on nodes of their own, and the router
settle                 wait until every computed block is stored
"""
