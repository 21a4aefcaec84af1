"""Generated gRPC code and its conversion to and from `kvstore.wire`.

feeds   messages of the index: checked here, once, at the door
rows    answers of inspect and explain
"""
