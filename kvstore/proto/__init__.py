"""Generated gRPC code and its conversion to and from `kvstore.wire`.

feeds, loans   messages of the index, and between nodes: checked here, once, at the door
pushes         of them, those about pushes
rows           answers of inspect and explain
"""
