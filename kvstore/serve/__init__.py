"""The shell: processes, sockets, loops, flags. Decides nothing about blocks."""

import os

# gRPC writes a line of its own for every handshake that fails: anybody who reaches a port could
# fill the log. What concerns an operator is logged by us. Read when gRPC is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
