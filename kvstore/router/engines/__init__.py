"""Engines behind the router.

workers     state of each, counts, breakers
kinds       vLLM, SGLang, TGI, …: their health and metrics in one table; probes: calls of them
discovery   sources of workers; slices: Kubernetes' EndpointSlices
"""
