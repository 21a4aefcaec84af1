"""Engines behind the router.

workers     state of each, counts, breakers
connections HTTP to engines, kept and without a task a piece
kinds       vLLM, SGLang, TGI, …: their health and metrics in one table; probes: calls of them
discovery   sources of workers; slices: Kubernetes' EndpointSlices
"""
