"""Engines behind the router.

workers     state of each, counts, breakers; models of the policy that no worker serves
connections HTTP to engines, kept and without a task a piece; attempts: answers for clients
calls       whole answers, for the router itself; failures: what goes wrong at engines
probes      health, metrics and models of vLLM, SGLang, TGI, …, by one table of kinds of engines
discovery   sources of workers: flags, DNS, the index, Kubernetes' EndpointSlices
"""
