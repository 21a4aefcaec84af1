"""Generated gRPC code and its conversion to and from `kvstore.wire`."""
