"""Output for an operator: metrics, logs, times.

metrics   every metric in one table: name with unit, labels, help; durations
logs      one line a record, and never a flood
reasons   words and sentences of reasons for hits and misses
traces    spans for a collector, on a thread of their own
"""
