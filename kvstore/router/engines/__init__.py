"""Engines behind the router.

workers     state of each, counts, breakers; models of the policy that no worker serves
connections HTTP to engines, kept and without a task a piece; attempts: answers for clients
calls       whole answers, for the router itself; failures: what goes wrong at engines
kinds       vLLM, SGLang, TGI, …: their health and metrics in one table; probes: calls of them
discovery   sources of workers: flags, DNS, the index, Kubernetes' EndpointSlices
"""
