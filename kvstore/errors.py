"""The exceptions of kvstore. The type names the side that is to blame.

    KVStoreError
    ├── ConfigError      the operator: a flag, key or size; the text says how to mend it
    ├── ProtocolError    the peer: a datagram that is malformed, too long or out of turn
    ├── AttachError      the surroundings: no node, another version, refused
    ├── TransportError   a peer or its back end: unreachable, or an invalid answer
    └── NodeBusy         the node's loop: it has other things to do

A bug of our own is an AssertionError. Full, late, busy and absent are not errors but outcomes.
"""

from __future__ import annotations


class KVStoreError(Exception):
    """Root of everything that kvstore raises on purpose."""


class ConfigError(KVStoreError, ValueError):
    """A setting that cannot work. Stops the start with this one sentence."""


class ProtocolError(KVStoreError):
    """A peer broke the attach protocol. Its connection is closed, nothing else happens."""


class AttachError(KVStoreError):
    """The node cannot be reached or will not serve this engine. The cache is off until it can."""


class TransportError(KVStoreError):
    """A peer cannot be read from. Nothing was begun that could still write."""


class NodeBusy(KVStoreError):
    """The loop did not get to a query in time, or too many wait already. Ask again later."""
