"""The process that holds a node's memory and starts another node process when one ends.

supervisor          its loop, and how the command line becomes it
child               one node process, what is kept of it for the next one, and when that is started
control, handover   messages between both; the node's end, code on disk
sockets             the attach socket's files; requests for the code on disk
"""
