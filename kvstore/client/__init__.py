"""The engine's side of the attach protocol: a pure core, and the socket that carries it."""
