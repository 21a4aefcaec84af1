"""`kvstore demo`: a real vLLM without and with kvstore, and the means to start one.

flags, play, cluster   command line; one node; two nodes and an index
models, workload       small models on this machine; conversations and prompts
engine, engine_config, guard   a vLLM server as a child that leaves no process behind
settle                 wait until every computed block is stored
"""
