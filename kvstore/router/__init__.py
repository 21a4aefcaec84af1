"""The router: requests to the engine that has the longest prefix and the shortest queue.

    client ─▶ front ─▶ keys ─▶ dispatch (kvstore.routing decides) ─▶ engines.connections ─▶ engine

A plain request in the modules that it passes (`tests/unit/router/test_request_path.py`):

    door ─▶ proxy ─▶ intake ─▶ prefixes ─▶ intake: its body, fields and keys
         ─▶ proxy ─▶ dispatch ─▶ proxy: its worker
         ─▶ connections ─▶ dispatch ─▶ connections: sent, first token, passed on
         ─▶ proxy ─▶ dispatch ─▶ proxy ─▶ door: its end

front         HTTP: connections of clients, requests
engines       workers, their health and metrics, where they come from, HTTP to them
keys          tokens and keys of prompts, the index, parity
dispatch      the decision core on a loop; one request for it, from front ends
rpc           gRPC servers: Route, and picker (endpoint picker for Envoy)
exchange      what other routers of the same engines have in flight
ahead         blocks that nodes are to bring to dram before an engine asks
process       its loop, policy, start and end; pages: /metrics and /healthz
receipt_log   receipts on disk; traces: spans made from them
"""

import kvstore.net  # noqa: F401 -- it makes gRPC quiet, before anything imports it
