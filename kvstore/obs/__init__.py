"""What an operator sees: metrics, logs, explanations."""
