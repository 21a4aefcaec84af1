"""A shared, verified KV cache for LLM engines. README.md beside this file is the map of the rooms.

arena     the shared memory of a node
ports     the pure core's needs from the world
types, units, errors, wording, installation   shared by all
breaker, mailbox   mechanisms of several packages
plan      sizes of a model's caches, for `kvstore plan`
"""

from typing import Final

__version__: Final = "0.1.0"
