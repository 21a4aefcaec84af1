"""A pytest plugin for vLLM's own tests: whichever connector they ask for, they get kvstore's.

Loaded into upstream's pytest run by `run.py`, never into ours. vLLM's scheduler, the connector's
scheduler side, its socket and the node are real; a rank is played (it attaches and is quiet), since
these tests play the worker themselves. What a test says is cached elsewhere (`matched_tokens`,
`do_remote_prefill`, the script of a mocked connector) is put into the node first, by an engine of
this plugin, and then the answer must be the connector's own.

Does not cover: which tests apply (`selection.py`).
"""

from __future__ import annotations

import importlib
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, cast
from unittest.mock import Mock

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

from kvstore.client.core.plan import LoadJob, LoadResult, RankReport
from kvstore.client.core.request import LookupStage
from kvstore.client.link import Link, Lost
from kvstore.connector import scheduler_side
from kvstore.connector.vllm import KVStoreConnector, KVStoreWorkerMetadata
from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    HEAD_COUNT,
    LAYER_COUNT,
    RawEngine,
    make_space,
)
from kvstore.types import Shard
from kvstore.wire.messages import PROTOCOL_VERSION, HelloRank, Quiesce, Quiet
from kvstore.wire.space import Group

ATTACH_S: Final = 10.0
PATIENT: Final[dict[str, object]] = {
    "lookup_deadline_ms": 1000,
    "heartbeat_timeout_ms": 10_000,
    "min_load_tokens": 0,
}

SYNCHRONOUS: Final = "synchronous load: kvstore's are all asynchronous"
SEVERAL_GROUPS: Final = "several KV cache groups: what is stored beforehand has one"
REFUSED: Final = {
    "recomputes after a failed load": "policy fail: kvstore refuses to start with it",
    "with one KV cache group": "drafts beside several groups: kvstore refuses to start",
    "at the end of blocks": "recurrent layers without prefix caching: kvstore refuses to start",
    "may be rejected": "drafts beside recurrent layers: kvstore refuses to start",
    "serves full attention": "no full attention: kvstore refuses to start",
    "whole blocks": "context parallelism: kvstore refuses to start",
}
"""Words of the connector's own sentence: why the test does not apply."""
ABOUT_POLICY_FAIL: Final = (
    "test_error_propagation.py",
    "test_cache_pollution_prevention.py",
    "test_sync_fail_invalid_blocks_evicted",
    "test_failed_receive_completion_honors_failure_policy[fail]",
)
"""Tests whose subject is the policy that kvstore refuses."""


class Stock:
    """The node of one test, and the engine that fills it.

    Not one node for all: slots served to a process that lives on, as this one does, stay set aside.
    """

    def __init__(self, stack: ExitStack) -> None:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.node = stack.enter_context(NodeProcess.start(directory, dram="128MiB"))
        self.connectors: list[KVStoreConnector] = []
        self._stack = stack
        self._filler: RawEngine | None = None
        self._held: set[bytes] = set()

    def hold(self, keys: list[bytes]) -> None:
        """Return once the node holds all of `keys`."""
        new = [key for key in keys if key not in self._held]
        if not new:
            return
        if self._filler is None:
            self._filler = self._stack.enter_context(RawEngine(self.node.socket))
            self._filler.open()
        self._filler.store(new)
        self._filler.release(self._filler.lease_stored(keys))
        self._held.update(new)

    def attach(self, connector: KVStoreConnector, config: Any) -> None:
        """Play the rank of this connector's engine until the session is open."""
        side = connector._scheduler
        assert side is not None
        transfer = config.kv_transfer_config
        rank = Link.connect(
            self.node.socket,
            HelloRank(
                protocol=PROTOCOL_VERSION,
                engine_id=transfer.engine_id,
                nonce=config.instance_id or "0",
                tenant="default",
                rank=0,
                process=secrets.token_hex(8),
                groups=(Group(make_space(), Shard(0, LAYER_COUNT, 0, HEAD_COUNT), BLOCK_BYTES),),
            ),
        )
        self._stack.callback(rank.close)
        self._stack.callback(connector.shutdown)
        self.connectors.append(connector)
        deadline = time.monotonic() + ATTACH_S
        while not side._core.attachment.is_open:
            assert time.monotonic() < deadline, "the node opened no session"
            side.poll()
            for message in rank.receive():
                assert not isinstance(message, Lost), message
                if isinstance(message, Quiesce):
                    rank.send(Quiet(session=message.session))


_stack = ExitStack()
_stock: Stock | None = None
_about_policy_fail = False


def _the_stock() -> Stock:
    """The test's own, started when it is first needed."""
    global _stock
    if _stock is None:
        _stock = Stock(_stack)
    return _stock


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("cpu_test", "slow_test", "optional", "skip_global_cleanup"):
        config.addinivalue_line("markers", f"{marker}: upstream's")
    # The answer must be there in the step that asks: upstream's tests count steps.
    scheduler_side._SPIN_NS_PER_STEP = scheduler_side._SPIN_NS_IDLE = 1_000_000_000
    create = KVConnectorFactory.create_connector
    KVConnectorFactory.create_connector = _substitute(create)
    utils: Any = importlib.import_module("tests.v1.kv_connector.unit.utils")
    utils.create_mock_connector = _scripted


@pytest.fixture(autouse=True)
def _own_connectors(request: pytest.FixtureRequest) -> Iterator[None]:
    global _stock, _about_policy_fail
    _about_policy_fail = any(word in request.node.nodeid for word in ABOUT_POLICY_FAIL)
    yield
    went_off = [one for one in _stock.connectors if one.is_off] if _stock else []
    _stock = None
    _stack.close()
    assert not went_off, "the connector caught an error of its own: see the log"


def _substitute(create: Callable[..., Any]) -> Callable[..., Any]:
    """Every connector of a scheduler is a KVStoreConnector, attached to the node."""

    def created(config: Any, role: KVConnectorRole, kv_cache_config: Any) -> Any:
        transfer = config.kv_transfer_config
        if transfer.kv_connector == "MultiConnector" or role is KVConnectorRole.WORKER:
            return create(config, role, kv_cache_config)
        if not _about_policy_fail:
            transfer.kv_load_failure_policy = "recompute"  # vLLM's default is the other
        wanted = dict(transfer.kv_connector_extra_config)
        transfer.kv_connector = "KVStoreConnector"
        transfer.kv_connector_module_path = "kvstore.connector"
        transfer.kv_connector_extra_config = {"socket": str(_the_stock().node.socket), **PATIENT}
        config.cache_config.prefix_caching_hash_algo = "sha256_cbor"
        try:
            connector = create(config, role, kv_cache_config)
        except ValueError as error:
            pytest.skip(_refusal(str(error)))
        assert type(connector) is KVStoreConnector
        if connector._scheduler is not None and connector._scheduler._groups is not None:
            pytest.skip(SEVERAL_GROUPS)
        _the_stock().attach(connector, config)
        _stock_as_asked(connector, wanted, config.cache_config.block_size)
        return connector

    return created


def _refusal(sentence: str) -> str:
    """Why kvstore does not start in the engine that a test makes; unknown reasons are failures."""
    for words, reason in REFUSED.items():
        if words in sentence:
            return reason
    raise AssertionError(sentence)


def _stock_as_asked(connector: KVStoreConnector, wanted: dict[str, Any], block_tokens: int) -> None:
    """Before a request is matched, put what the test says is elsewhere into the node."""
    match = connector.get_num_new_matched_tokens

    def stocked(request: Any, computed: int) -> tuple[int | None, bool]:
        if wanted.get("is_async") is False and wanted.get("matched_tokens"):
            pytest.skip(SYNCHRONOUS)
        params = request.kv_transfer_params or {}
        tokens = computed + wanted.get("matched_tokens", 0)
        if params.get("do_remote_prefill"):
            tokens = request.num_prompt_tokens
        _the_stock().hold(list(request.block_hashes[: tokens // block_tokens]))
        return match(request, computed)

    cast("Any", connector).get_num_new_matched_tokens = stocked
    admit = connector.update_state_after_alloc

    def admitted(request: Any, blocks: Any, tokens: int) -> None:
        """A test that answers in the connector's place must say what the connector would."""
        side = connector._scheduler
        assert side is not None
        entry = side._core.requests[request.request_id]
        if tokens and entry.stage is LookupStage.NONE:
            _the_stock().hold(list(request.block_hashes[: tokens // block_tokens]))
            answer = match(request, 0)
            assert answer == (tokens, True), f"the script says {tokens} tokens, kvstore {answer}"
        admit(request, blocks, tokens)

    cast("Any", connector).update_state_after_alloc = admitted
    build = connector.build_connector_meta
    jobs: dict[str, LoadJob] = {}

    def listed(output: Any) -> Any:
        """The mocked connector lists what was scheduled, and tests read that list."""
        metadata: Any = build(output)
        jobs.update({job.request: job for job in metadata.plan.loads})
        for store in metadata.plan.stores:  # the played rank drops it and says so at once
            report = RankReport(0, (), (store.job,), 0, len(store.block_ids))
            connector.update_connector_output(_output_with(report))
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        names = [new.req_id for new in output.scheduled_new_reqs]
        names += [name for name in output.scheduled_cached_reqs.req_ids if name in resumed]
        metadata.requests = [{"req_id": name} for name in names]
        return metadata

    cast("Any", connector).build_connector_meta = listed
    _report_loads(connector, jobs)


def _output_with(report: RankReport) -> KVConnectorOutput:
    return KVConnectorOutput(kv_connector_worker_meta=KVStoreWorkerMetadata([report]))


def _report_loads(connector: KVStoreConnector, jobs: dict[str, LoadJob]) -> None:
    """Say what the rank would have said beside `finished_recving`, which is all that tests send."""
    hear = connector.update_connector_output

    def heard(output: Any) -> None:
        done = [jobs.pop(name) for name in output.finished_recving or () if name in jobs]
        if done:
            failed = output.failed_recving or ()
            loads = [
                LoadResult(j.request, j.lease, 0, j.block_ids, 0, 0)
                if j.request in failed
                else LoadResult(j.request, j.lease, len(j.block_ids), (), 0, 0)
                for j in done
            ]
            report = RankReport(0, tuple(loads))
            output.kv_connector_worker_meta = KVStoreWorkerMetadata([report])
        hear(output)

    cast("Any", connector).update_connector_output = heard


def _scripted() -> Mock:
    """In place of upstream's mocked connector: ours, of which a test may script methods.

    A scripted match is put into the node, and then ours must answer the same by itself.
    """
    connector = _the_stock().connectors[-1]
    mock = Mock(wraps=connector)
    mock.get_num_new_matched_tokens = _ScriptedMatch(connector)
    return mock


class _ScriptedMatch(Mock):
    """Counts calls and holds a script, as upstream expects of it."""

    def __init__(self, connector: KVStoreConnector | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.__dict__["_connector"] = connector

    def __call__(self, request: Any, computed: int) -> Any:
        expected = super().__call__(request, computed)
        tokens, is_async = expected
        if tokens and not is_async:
            pytest.skip(SYNCHRONOUS)
        _the_stock().hold(list(request.block_hashes[: (computed + tokens) // BLOCK_TOKENS]))
        answer = self.__dict__["_connector"].get_num_new_matched_tokens(request, computed)
        assert answer == expected, f"the script says {expected}, kvstore {answer}"
        return answer
