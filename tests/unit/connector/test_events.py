"""--kv-events-config to where the node reads, or one line why it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvstore.connector.config import event_endpoints

if TYPE_CHECKING:
    from vllm.config.kv_events import KVEventsConfig

pytestmark = pytest.mark.engine


def config(endpoint: str = "tcp://*:5557", **changes: Any) -> KVEventsConfig:
    from vllm.config.kv_events import KVEventsConfig

    return KVEventsConfig(**{"enable_kv_cache_events": True, "endpoint": endpoint} | changes)


@pytest.mark.parametrize(
    ("endpoint", "replay", "rank", "expected"),
    [
        ("tcp://*:5557", None, 0, ("tcp://127.0.0.1:5557", "")),
        ("tcp://*:5557", "tcp://*:6557", 2, ("tcp://127.0.0.1:5559", "tcp://127.0.0.1:6559")),
        ("tcp://[::]:5557", "tcp://127.0.0.1:7", 0, ("tcp://[::1]:5557", "tcp://127.0.0.1:7")),
        ("ipc:///run/e.kv", "ipc:///run/r:1", 0, ("ipc:///run/e.kv", "ipc:///run/r:1")),
    ],
)
def test_what_the_engine_listens_on_is_reached_on_this_machine(
    endpoint: str, replay: str | None, rank: int, expected: tuple[str, str]
) -> None:
    assert event_endpoints(config(endpoint, replay_endpoint=replay), rank) == expected


@pytest.mark.parametrize(
    ("endpoint", "rank"),
    [("tcp://127.0.0.1:5557", 0), ("tcp://*:0", 0), ("ipc:///run/e.kv", 1)],
)
def test_where_the_node_cannot_read_is_one_line(
    endpoint: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        "kvstore.connector.config.logger.warning", lambda text, *more: said.append(text % more)
    )
    assert event_endpoints(config(endpoint), rank) == ("", "")
    (line,) = said
    assert f"KV events at {endpoint} are not read by the node" in line
