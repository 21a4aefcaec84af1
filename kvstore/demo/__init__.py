"""`kvstore demo`: a real vLLM without and with kvstore, and the means to start one.

flags, play        command lines; the act that is named, and what it shows
up                 `kvstore up`: node, engines and router until Ctrl-C
stage              what all acts run on, and when blocks are stored
models, workload   small models on this machine; conversations and prompts
engine, guard      a vLLM server as a child that leaves no process behind; a client of it
"""
