"""The process that holds a node's memory and starts another node process when one ends.

begin, supervisor   from the command line to it; its loop
child, restarts     one node process; when another is started, and when no more
kept, control, handover   descriptors it keeps; messages between both; the node's end, code on disk
listener, upgrade   the attach socket's files; requests for the code on disk
"""
