"""The shell: processes, sockets, loops, flags. Decides nothing about blocks."""
