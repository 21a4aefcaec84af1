"""Eviction policies: each decides only which slot goes next."""
