"""Mechanisms behind the `Tier` port: memory that holds slots."""
