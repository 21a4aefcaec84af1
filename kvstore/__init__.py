"""A shared, verified KV cache for LLM engines. README.md beside this file is the map."""
