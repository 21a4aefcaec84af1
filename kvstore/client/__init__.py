"""The engine's side of the attach protocol, and a client of the index.

core/     the pure part: decisions about lookups, loads, stores and fences
link      the socket that carries it
index     a client of the global prefix index, for routers and scripts
tls, certificates   three files and the names in them; reading and judging the files
address   HOST:PORT, where HOST may be a name
reasons   why a connection failed, in an operator's words
"""
