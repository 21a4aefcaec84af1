"""The workers as the core knows them.

    probes, scrapes, flights ─▶ fleet (one row a worker) ─▶ columns of `features`

health          one worker's probes, answers and circuit breaker
rows            columns, flights and state of each worker
pressure        saturation and cause, degradation, desired replicas
"""
