"""The connector with a planted bug: whatever the weights, their digest is the same.

connector=("tests.kit.same_digest", "SameDigestConnector")
"""

from __future__ import annotations

from kvstore.connector import worker_side
from kvstore.connector.vllm import KVStoreConnector
from kvstore.connector.weights import WeightsDigest

vars(worker_side)["digest_weights"] = lambda *_: WeightsDigest("same", 1, 1)


class SameDigestConnector(KVStoreConnector):
    """See the module."""
