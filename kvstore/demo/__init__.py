"""`kvstore demo`: a real vLLM without and with kvstore, and the means to start one.

flags, play            command line; the act that it names, and --keep
act, stage             what all acts show; what all acts run on
restarts, cluster      one node that outlives its engine; two nodes as one cache
pd, router             prefill and decode; two engines behind the router, beside round robin
models, workload       small models on this machine; conversations and prompts
engine, engine_config, guard   a vLLM server as a child that leaves no process behind
completions            a client of it, or of a proxy
settle                 wait until every computed block is stored
"""
