"""An endpoint picker that decides nothing: what gRPC's asyncio server and Envoy cost by themselves.

    python empty_picker.py HOST:PORT        picks that worker always; ready line on stdout

It reads and answers the same messages as `kvstore.router.picker`, made by the same functions.
"""

from __future__ import annotations

import sys

import grpc

from kvstore.proto import picker_pb2 as pb
from kvstore.router.picker import ANSWER_SEEN, SERVICE, Context, chosen, passed_back, pieces


async def _main(place: str) -> None:
    async def process(_: object, context: Context) -> None:
        body = b""
        while isinstance(message := await context.read(), pb.ProcessingRequest):
            kind = message.WhichOneof("request")
            if kind == "request_body":
                body += message.request_body.body
                if message.request_body.end_of_stream:
                    for response in (chosen(place, None), *pieces(body)):
                        await context.write(response)
            elif kind == "response_headers":
                await context.write(ANSWER_SEEN)
            elif kind == "response_body":
                await context.write(passed_back(message.response_body))

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(
        process,
        request_deserializer=pb.ProcessingRequest.FromString,
        response_serializer=pb.ProcessingResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"picker ready {port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_main(sys.argv[1]))
