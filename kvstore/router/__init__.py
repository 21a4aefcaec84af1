"""The router: requests to the engine that has the longest prefix and the shortest queue.

    client ─▶ front ─▶ keys ─▶ dispatch (kvstore.routing decides) ─▶ front.attempt ─▶ engine

front         HTTP: connections, requests, attempts
engines       workers, their health and metrics, where they come from
keys          tokens and keys of prompts, the index, parity
rpc           gRPC servers: route_service (Route), picker (endpoint picker for Envoy)
exchange      what other routers of the same engines have in flight
ahead         blocks that nodes are to bring to dram before an engine asks
dispatch      the decision core on a loop; life: one request for it, from front ends
process       its loop, policy, start and end; pages: /metrics and /healthz
receipt_log   receipts on disk; traces: spans made from them
pools         models of the policy that no worker serves
"""

import kvstore.net  # noqa: F401 -- it makes gRPC quiet, before anything imports it
