"""Sockets, threads and system calls for all processes.

aio       a thread with an asyncio loop
server    a gRPC server: TLS; whose certificate a caller has (`require_node`); limits of
          connections; calls of one message each, where silent ones cost no thread
http      read-only pages: /metrics, /healthz, and those of `site`
site      the page for people, and what its files are
process   a child of our own code, which can be killed at any time; limits and protections; the
          process that a pidfd stands for
"""

import os

# gRPC writes a line of its own for every handshake that fails: any host that reaches a port could
# fill the log. We log what concerns an operator. Read when gRPC is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
