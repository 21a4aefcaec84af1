"""Generated gRPC code and its conversion to and from `kvstore.wire`.

forms   questions to the index and its answers: checked here, once, at the door
rows    answers of inspect and explain
"""
