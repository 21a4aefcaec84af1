"""`kvstore demo`: a real vLLM without and with kvstore, and what it needs to start one.

flags, play, cluster   what may be said; one node; two nodes and an index
models, workload       small models on this machine; conversations and prompts
engine, engine_config, guard   a vLLM server as a child; nothing of it survives
settle                 waiting until all that was computed is stored
"""
