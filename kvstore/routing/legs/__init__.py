"""Legs of requests at their workers: where they are counted, doubled, and which workers serve them.

flights   counts and prefixes of each leg, both attempts of a race
blame     whose fault a failure is, and whether another worker is tried
races     a second worker for a request whose first byte is late
role_planner   roles of workers that may change them, by what a pool lacks
"""
