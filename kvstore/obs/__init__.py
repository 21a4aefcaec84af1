"""Output for an operator: metrics, logs, times.

metrics   every metric in one table: name with unit, labels, help
logs      one line a record, and never a flood
timings   durations
"""
