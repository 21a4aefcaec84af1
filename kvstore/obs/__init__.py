"""What an operator sees: metrics, logs, explanations.

metrics   every metric in one table: name with unit, labels, help
logs      one line a record, and never a flood
timings   how long things took
"""
