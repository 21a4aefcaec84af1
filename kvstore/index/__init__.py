"""Keys of prompts (pure): `chain.py` computes, from tokens, what engines call their blocks."""
