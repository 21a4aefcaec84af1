"""An engine that costs as little as Python can: HTTP over asyncio's streams, answers made before.

    python router_worker.py PORT        ready line on stdout

A streamed request gets `max_tokens` events, RATE a second, each with the time at which it was
written: the reader computes the delay on the way. Everything else gets an answer at once. Endpoints
that routers ask when a worker joins are there; `/v1/completions/render` is not (404).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

RATE = 50
_JSON = "Content-Type: application/json\r\n"
_MODELS = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]})
_DONE = json.dumps({"id": "x", "object": "text_completion", "choices": [{"text": "a", "index": 0}]})
_INFO = json.dumps({"model_path": "m", "served_model_name": "m", "tp_size": 1, "dp_size": 1})


def _answer(body: str, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\n{_JSON}Content-Length: {len(body)}\r\n\r\n{body}".encode()


DONE, MODELS, INFO = _answer(_DONE), _answer(_MODELS), _answer(_INFO)
MISSING = _answer('{"error": "none"}', "404 Not Found")
METRICS = _answer("vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n")


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            line, low = head.split(b"\r\n", 1)[0], head.lower()
            body = await _body(reader, low)
            path = line.split(b" ")[1]
            if path == b"/v1/completions":
                if b'"stream": true' in body or b'"stream":true' in body:
                    await _stream(writer, json.loads(body)["max_tokens"])
                else:
                    writer.write(DONE)
            else:
                known = {b"/v1/models": MODELS, b"/metrics": METRICS}
                plain = INFO if not path.endswith(b"/render") else MISSING
                writer.write(known.get(path, plain))
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def _body(reader: asyncio.StreamReader, low: bytes) -> bytes:
    if b"content-length: " in low:
        size = int(low.split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0])
        return await reader.readexactly(size)
    if b"transfer-encoding: chunked" not in low:
        return b""
    body = b""
    while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return body


async def _stream(writer: asyncio.StreamWriter, count: int) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    begin_s = time.monotonic()
    for number in range(count):
        await asyncio.sleep(max(0.0, begin_s + number / RATE - time.monotonic()))
        event = b'data: {"at": %d, "text": "tokens"}\n\n' % time.monotonic_ns()
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        await writer.drain()
    writer.write(b"0\r\n\r\n")


async def _main(port: int) -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", port, limit=1 << 20, backlog=1024)
    print(f"worker ready http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_main(int(sys.argv[1])))
