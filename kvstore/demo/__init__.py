"""`kvstore demo`: a real vLLM without and with kvstore, and the means to start one.

play               four acts, and what is shown of the one that is named
up                 `kvstore up`: node, engines and router until Ctrl-C
stage              what all acts run on, and when blocks are stored
models, workload   small models on this machine; conversations and prompts
engine             a vLLM server as a child that leaves no process behind; a client of it
"""
