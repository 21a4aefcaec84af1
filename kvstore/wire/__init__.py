"""Forms that leave a process. Pure.

messages     the attach protocol: every datagram between an engine and the node
peers        messages between nodes, and from routers to nodes
feed         messages of a node's feed to a replica of the index
requests     what a request brings beside its tokens: kv_transfer_params, the header of its trace
transfer_worker   the datagrams between a node process and its transfer worker
load         what a node, its engines and a router do in numbers; what a node has measured
kv_events    what a node, and what an engine publishes, in vLLM's form
space        the fingerprint of everything, tokens aside, that changes the bytes of a block, and
             their layout in a slot
record, segment   a block's address, checksum and page on disk; the file of records
assembly     blocks that come in other shards than are wanted
identity     the names that a certificate gives its owner; imported by commands that start at once
bounds       bounded kinds of fields, which all structs are made of
"""
