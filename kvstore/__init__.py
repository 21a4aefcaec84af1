"""A shared, verified KV cache for LLM engines. README.md beside this file is the map."""

from typing import Final

__version__: Final = "0.1.0"
