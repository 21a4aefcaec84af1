"""Legs of requests at their workers: where they are counted, doubled, and which workers serve them.

flights   counts, breakers and prefixes of each leg, both attempts of a race
races     a second worker for a request whose first byte is late
planner   roles of workers that may change them, by what a pool lacks
"""
