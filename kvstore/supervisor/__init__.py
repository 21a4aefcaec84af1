"""The process that holds a node's memory and starts another node process when one ends.

begin, supervisor   from the command line to it; its loop
child, restarts     one node process; when another is started, and when no more
kept, control, handover   what it keeps; what the two tell each other; the other end
listener, upgrade   the attach socket's files; asking for the code on disk
installed           which code a process runs, and which is installed by now
"""
