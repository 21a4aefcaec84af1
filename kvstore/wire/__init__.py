"""Forms that leave a process. Pure.

messages     the attach protocol: every datagram between an engine and the node
peers        messages between nodes, and from routers to nodes
feed         messages of a node's feed to a replica of the index
routers      messages between routers
transfers    kv_transfer_params of requests: what both legs share
transfer_worker   the datagrams between a node process and its transfer worker
bounds       bounded kinds of fields, which all structs are made of
space        the fingerprint of everything, tokens aside, that changes the bytes of a block
identity     the names that a certificate gives its owner
layout       how a block lies in its slot; places of copies in a node's GPU memory
assembly     blocks that come in other shards than are wanted
checksum     of a block: a tree over its address and its bytes
record, segment    the address of a block and the page before it on disk; the file of records
kv_events, engine_events   what a node, and what an engine publishes, in vLLM's form
traces       the header that joins spans of a request in several services
learned, load      what a node has measured, and what it does, in numbers
"""
