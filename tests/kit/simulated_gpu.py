"""The connector in an engine whose cache is taken for the memory of a simulated GPU.

    --kv-transfer-config '{"kv_connector": "SimulatedGpuConnector",
                           "kv_connector_module_path": "tests.kit.simulated_gpu", …}'

Everything is the product's own but the device: copies go through `kernels.device`, in an order that
the device chooses, later than they are ordered, from memory that has to be pinned.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.client.core.costs import Costs, SourcePace
from kvstore.connector.devices import host_caches
from kvstore.connector.mapping import GroupLayers
from kvstore.connector.vllm import KVStoreConnector
from kvstore.ports import CopyEngine
from tests.kit.simulated_device import simulated_copies

# The pace of a simulated device says nothing about the one of a GPU: on a quick machine it would be
# computed instead of loaded, and from dram.
Costs.loads_pay = property(lambda _: True)  # type: ignore[assignment,method-assign]
SourcePace.takes_hbm = lambda _: True  # type: ignore[assignment,method-assign]


class SimulatedGpuConnector(KVStoreConnector):
    """See the module."""

    @staticmethod
    def open_copies(groups: Sequence[GroupLayers], block_count: int) -> CopyEngine:
        return simulated_copies(host_caches(groups, block_count))
