"""Whose fault a failure is: one rule for all front ends.

    leg failed ─▶ `failed` ─▶ the worker's: counted      500, broken, refused ─▶ suspects
    served elsewhere ─▶ the suspects' fault     failed at SUSPECTS_MAX workers ─▶ the request's own
    one worker tried ─▶ its fault, if others have served requests since it did (`failed_unproven`)

No request or caller can make workers look broken: what fails everywhere counts nowhere, and claims
of callers count for their own requests only.
"""

from __future__ import annotations

from typing import Final

from kvstore.routing.events import (
    Ending,
    Failure,
    FirstToken,
    Lack,
    Leg,
    LegFailed,
    PrefillDone,
    RaceOver,
    RequestEnded,
)
from kvstore.routing.requests import OpenRequest
from kvstore.routing.workers.fleet import Fleet

SUSPECTS_MAX: Final = 2
"""Workers that may fail at a request before it counts as the cause."""
REFUSALS_MAX: Final = 3
"""Workers that may refuse a request before the last answer goes to the client."""
_SUSPECT: Final = (Failure.ERROR, Failure.BROKEN)
_PUT_OFF: Final = (Failure.BUSY, Failure.REFUSED)


class Blame:
    """See the module."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def failed(
        self, opened: OpenRequest, worker: str, event: LegFailed | RaceOver, now_ns: int
    ) -> None:
        """Note that a worker failed at a request, which is not sent there again, and judge whose
        fault it is.
        """
        failure = event.failure
        assert failure is not None
        opened.failed.add(worker)
        if failure is Failure.SILENT:
            opened.slow.add(worker)
        opened.refusals += failure is Failure.REFUSED
        if isinstance(event, LegFailed) and event.is_claim:
            self._fleet.record_no_fault(worker, now_ns)
            return
        if failure not in _PUT_OFF:
            self._fleet.count_failure(worker)
        has_streamed = isinstance(event, LegFailed) and event.has_streamed
        if has_streamed and failure in _SUSPECT:
            self._fleet.failed_unproven(worker, event.why, now_ns)
            return
        is_prefill = isinstance(event, LegFailed) and event.leg is Leg.PREFILL
        opened.decode_suspects += failure in _SUSPECT and not is_prefill
        if event.lack is Lack.CONTEXT:
            opened.failed.update(self._fleet.no_longer(worker, opened.side.model))
        if event.lack is Lack.MEDIA and (state := self._fleet.state(worker)) is not None:
            state.without_media.add(opened.side.model)
        if failure is Failure.REFUSED and event.lack is None:  # others may not refuse it
            opened.suspects.append((worker, event.why))
            return
        self._count(opened, worker, failure, event.why, now_ns)

    def _count(
        self, opened: OpenRequest, worker: str, failure: Failure, why: str, now_ns: int
    ) -> None:
        if failure is Failure.STATUS:
            self._fleet.failed(worker, why, now_ns)
        elif failure in _SUSPECT:  # a half-open breaker waits for the verdict
            opened.suspects.append((worker, why))
        else:
            self._fleet.record_no_fault(worker, now_ns, is_full=failure is Failure.BUSY)

    def prefilled(self, opened: OpenRequest, event: PrefillDone, now_ns: int) -> None:
        """A remote prefill is over, and its request goes on: judge the prefiller."""
        assert opened.placement is not None
        worker = opened.placement.prefill_worker
        if event.failure is None:
            self._fleet.answered(worker, now_ns, is_whole=True)
        else:
            self._count(opened, worker, event.failure, event.why, now_ns)

    def begun(self, opened: OpenRequest, event: FirstToken, now_ns: int) -> None:
        """The first byte of a response came, from another worker than the chosen one if a gateway
        chose it.
        """
        why = "the gateway went elsewhere"
        self._served(opened, event.served_by, why, now_ns, is_whole=False)

    def ended(self, opened: OpenRequest, event: RequestEnded, now_ns: int) -> None:
        """Verdict on the worker of a request that has ended."""
        if event.end in (Ending.DONE, Ending.REFUSED):  # it answered: a 4xx is the client's
            self._served(opened, event.served_by, event.why, now_ns, is_whole=True)
        elif opened.placement is not None:
            worker = event.served_by or opened.placement.worker
            if event.end is Ending.FAILED:
                self._fleet.failed_unproven(worker, event.why, now_ns)
            elif not (opened.has_begun or opened.is_held):
                self._fleet.record_no_fault(worker, now_ns)
                if opened.race is not None:
                    self._fleet.record_no_fault(opened.race.worker, now_ns)

    def _served(
        self, opened: OpenRequest, served_by: str, why: str, now_ns: int, *, is_whole: bool
    ) -> None:
        """A worker answers a request: earlier failures of the request were the fault of their
        workers.
        """
        if opened.placement is None:
            return
        chosen = opened.placement.worker
        if served_by not in ("", chosen) and not opened.is_elsewhere:
            opened.is_elsewhere = True
            self._fleet.count_failure(chosen)
            opened.suspects.append((chosen, why))
        self._fleet.answered(served_by or chosen, now_ns, is_whole=is_whole)
        for suspect, why in opened.suspects:
            self._fleet.failed(suspect, why, now_ns)
        opened.suspects.clear()

    def unserved(self, opened: OpenRequest, now_ns: int) -> None:
        """A request is over without an answer. A single suspect is judged by `failed_unproven`;
        several are cleared, since the request is the likely cause.
        """
        if len(opened.suspects) == 1 and opened.decode_suspects:
            self._fleet.failed_unproven(*opened.suspects[0], now_ns)
        else:
            for suspect, _ in opened.suspects:
                self._fleet.record_no_fault(suspect, now_ns)
        opened.suspects.clear()


def may_retry(opened: OpenRequest, failure: Failure, *, has_budget: bool) -> bool:
    """Whether a request that failed at a worker is sent to another one, where there is one."""
    if failure is Failure.REFUSED:
        return opened.refusals < REFUSALS_MAX or opened.request.is_bound_to_one
    if failure in _SUSPECT:
        return opened.decode_suspects < SUSPECTS_MAX
    return has_budget or failure is not Failure.STATUS
