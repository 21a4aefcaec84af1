"""The KV cache group of an engine that has one, without vLLM."""

from __future__ import annotations

from kvstore.connector.groups import EngineGroups


class OneGroup(EngineGroups):
    """An engine's only group, of blocks of `block_tokens` tokens."""

    def __init__(self, block_tokens: int) -> None:
        self.served, self.names, self.are_several = (0,), ("full attention",), False
        self.block_sizes = self.table_tokens = (block_tokens,)
        self.key_tokens, self.rules, self._states = block_tokens, None, []
