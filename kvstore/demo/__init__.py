"""`kvstore demo`: a real vLLM without and with kvstore, and the means to start one.

flags, play            command line; the act that it names, of which one node that outlives its
                       engine and two nodes as one cache are short enough to be here
up                     `kvstore up`: node, engines and router until Ctrl-C
act, stage             what all acts show; what all acts run on, and when blocks are stored
pd, router             prefill and decode; two engines behind the router, beside round robin
models, workload       small models on this machine; conversations and prompts
engine, engine_config, guard   a vLLM server as a child that leaves no process behind
completions            a client of it, or of a proxy
"""
