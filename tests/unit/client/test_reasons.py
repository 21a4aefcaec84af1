"""Clauses about calls that failed."""

from __future__ import annotations

import grpc
import pytest

from kvstore.client.index import reason_of


def error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


@pytest.mark.parametrize(
    ("failed", "clause"),
    [
        (TimeoutError(), "no answer in time"),
        (error(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"), "it is an older one"),
        (
            error(
                grpc.StatusCode.UNAVAILABLE,
                "failed to connect to all addresses; last error: UNKNOWN: Connection refused",
            ),
            "nothing listens there (connection refused)",
        ),
        (error(grpc.StatusCode.RESOURCE_EXHAUSTED, "32 calls are open"), "32 calls are open"),
        (grpc.RpcError("the call was given up"), "the call was given up"),
    ],
)
def test_an_error_of_a_call(failed: Exception, clause: str) -> None:
    assert reason_of(failed, unimplemented="it is an older one") == clause


def test_a_call_that_a_server_lacks_has_the_words_of_grpc_by_itself() -> None:
    failed = error(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    assert reason_of(failed) == "Method not found!"
