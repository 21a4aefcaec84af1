"""`kvstore plan` (pure): sizes and times of a workload, from a model's config.json and rates.

caches      kinds of layers; bytes of each as vLLM allocates them
estimate    what GPUs, tiers and networks make of them
"""
