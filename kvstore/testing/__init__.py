"""The public test kit: clock, memory, world, contract suites, local models."""
