"""The engine's side of the attach protocol, and a client of the index.

core/     the pure part: decisions about lookups, loads, stores and fences
link      the socket that carries it
index     a client of the global prefix index, for routers and scripts; gRPC channels of all clients
tls, certificates   HOST:PORT, three files and the names in them; reading and judging the files
"""
