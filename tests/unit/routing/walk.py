"""A seeded walk of a core through a fleet that comes, goes, fails, is slow and lies, beside its
oracle (`oracle`). At the end all requests are aborted, or all workers are well again and every
request must be served."""

from __future__ import annotations

import random
from typing import get_args

import msgspec

from kvstore.index.feed import Holder, Trust
from kvstore.index.index import Match
from kvstore.routing.core import RouterCore
from kvstore.routing.events import (
    Arrived,
    Ending,
    Failure,
    Fault,
    FirstToken,
    Joined,
    Lack,
    Late,
    Leg,
    LegFailed,
    PrefillDone,
    PrepareAnswered,
    Probed,
    RequestEnded,
    Routed,
    RouteTick,
    Scraped,
    Shared,
    WorkerLeft,
)
from kvstore.routing.policy import PolicyName, RoutingPolicy, parse
from kvstore.routing.receipts import Receipt
from kvstore.routing.values import (
    LoadSample,
    PrefixAnswer,
    ProbeResult,
    RouteRequest,
    WorkerRole,
)
from kvstore.wire.load import EngineLoad
from kvstore.wire.peers import PrepareReply
from tests.unit.routing.fleets import (
    MS,
    S,
    fault,
    keys,
    knowing,
    request,
    spec,
)
from tests.unit.routing.oracle import (
    HELD_MAX,
    OPEN_MAX,
    QUEUE_MAX,
    RUNNING_MAX,
    Known,
    Oracle,
    Tried,
)

MEMORY_TOKENS = 40_000
CLASSES = ("inline", "interactive", "tolerant", "batch")
ROUNDS_MAX = 400
"""In which all that is left must be served."""


class Walk(Oracle):
    """One walk."""

    def __init__(self, seed: int, *, has_prefillers: bool | None = None) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.policy = self._policy()
        self.core = RouterCore(self.policy, seed=seed)
        self.arrived = 0
        self.has_prefillers = (
            self.random.random() < 0.5 if has_prefillers is None else has_prefillers
        )
        self.is_flexible = self.random.random() < 0.3
        for number in range(4):
            self._join(number)

    def _policy(self, *, is_draining: bool = True) -> RoutingPolicy:
        ttl = self.random.choice([{}, {"ttl_s": 20}])
        draining = [n for n in range(7) if is_draining and self.random.random() < 0.1]
        return parse(
            {
                "policy": self.random.choice([*get_args(PolicyName), "cost", "cost"]),
                "limits": {
                    "queue_max": QUEUE_MAX,
                    "running_max": RUNNING_MAX,
                    "held_max": HELD_MAX,
                    "holds_without_workers": self.random.random() < 0.5,
                },
                "classes": {
                    "inline": {
                        "rank": 0,
                        "queue_max": 4,
                        "ttl_s": 1,
                        "ttft_s": 2,
                        "tenants": ["x"],
                    },
                    "interactive": {"rank": 1, "queue_max": 6, "yield_s": 0.3, **ttl},
                    "tolerant": {"rank": 2, "queue_max": 6, "saturation_max": 0.9, **ttl},
                    "batch": {"rank": 3, "queue_max": 20, "ttl_s": 60, "backlog_s": 0.5},
                },
                "draining": [f"w{n}" for n in draining],
                "ahead": {
                    "open_max": OPEN_MAX,
                    "hot_requests": 3,
                    "pins_per_tenant": 2,
                    "touch_s": 0.1,
                },
                "tree_blocks_max": 40,
                "receipt_workers_max": 5,
                "races": {
                    "is_on": self.random.random() < 0.7,
                    "after_s_min": 0.001,
                    "burst": 1000,
                },
            }
        )

    def run(self, steps: int) -> None:
        """Random events, then everything ends; the core must be empty."""
        for _ in range(steps):
            self.now_ns += self.random.choice([0, MS, 20 * MS, 20 * MS, 300 * MS])
            self.one()
        if self.random.random() < 0.5:
            self.abort()
        else:
            self.serve()
        assert self.final.total() == self.arrived
        assert not self.core.fleet.flights
        assert not self.core.room.entries
        receipts = [draft.receipt() for draft in self.core.take_drafts()]
        assert msgspec.json.decode(msgspec.json.encode(receipts), type=list[Receipt]) == receipts

    def one(self) -> None:
        """One random event."""
        actions = {
            self.arrive: 10,
            self.first_token: 5,
            self.finish: 4,
            self.fail: 4,
            self.late: 3,
            self.end_race: 1,
            self.prefill_done: 3,
            self.tick: 3,
            self.worker: 1,
            self.judge: 0.5,
            self.probe: 3,
            self.scrape: 2,
            self.share: 1,
            self.adopt: 0.3,
            self.assign: 1,
        }
        self.random.choices(list(actions), list(actions.values()))[0]()

    # Requests

    def arrive(self) -> None:
        self.arrived += 1
        name = f"r{self.arrived}"
        tokens = self.random.choice([40, 300, 1000, 6000, 20_000])
        subset = None
        if self.specs and self.random.random() < 0.1:
            subset = tuple(self.random.sample(sorted(self.specs), 1))
        blocks = min(60, tokens // 512)
        half = blocks // 2
        is_batch = self.random.random() < 0.1
        chain = keys(self.random.choice("abc"), blocks)
        if is_batch:
            chain = keys("a", half) + keys("b", blocks - half)
        its = request(
            name,
            tokens,
            keys=chain,
            parts=(half, blocks - half) if is_batch else (),
            block_tokens=512,
            service=self.random.choice([*CLASSES, ""]),
            tenant=self.random.choice("xyz"),
            session=self.random.choice(["", "s1", "s2"]),
            priority=self.random.choice([0, 0, 1, -1]),
            subset=subset,
            output_tokens_max=self.random.choice([None, 10, 400]),
            is_streamed=self.random.random() < 0.7,
            media={"image": 1} if self.random.random() < 0.5 else {},
            is_bound_to_one=self.random.random() < 0.1,
            pin_s=self.random.choice([0, 0, 1, 900]),
            ends_session=self.random.random() < 0.1,
            has_side_effects=self.random.random() < 0.3,
        )
        self.requests[name] = self.every[name] = its
        self.tried[name] = Tried(self.now_ns)
        self.step(Arrived(knowing(its, self._prefix(its))))

    def _prefix(self, its: RouteRequest) -> PrefixAnswer | None:
        if self.random.random() < 0.3:
            return None
        blocks = len(its.keys) // 32
        matches = [
            Match(
                Holder(f"n{self.random.randrange(6)}", self.random.choice(["e", ""])),
                self.random.randint(0, blocks),
                self.random.randint(0, blocks),
                self.random.randint(0, blocks),
                self.random.choice(list(Trust)),
            )
            for _ in range(self.random.randrange(5))
        ]
        return PrefixAnswer(Trust.CATCHING_UP, matches, 1)

    def _any_sent(self) -> str | None:
        return self.random.choice(sorted(self.sent)) if self.sent else None

    def first_token(self) -> None:
        """Of an unstreamed one nobody sees it."""
        name = self._any_sent()
        if name is not None and self.requests[name].is_streamed:
            if name in self.raced:
                self.end_race(name)
            self.begun.add(name)
            self.step(FirstToken(name))

    def late(self) -> None:
        name = self._any_sent()
        if name is not None and name not in self.begun:
            self.step(Late(name))

    def end_race(self, name: str = "") -> None:
        if name or self.raced:
            name = name or self.random.choice(sorted(self.raced))
            loser = self.random.choice([self.sent[name].worker, self.raced[name]])
            self.race_over(name, loser, self.random.choice([None, *Failure]))

    def prefill_done(self) -> None:
        name = self._any_sent()
        if name is not None and self.sent[name].prefill_worker:
            self.prefilled.add(name)
            self.step(PrefillDone(name, fault(self.random.choice([None, None, *Failure]))))

    def finish(self) -> None:
        if self.requests:
            name = self.random.choice(sorted(self.requests))
            is_one = name in self.sent.keys() - self.raced.keys()
            self.close(name, self.random.choice(list(Ending)) if is_one else Ending.ABORTED)

    def close(self, name: str, end: Ending) -> None:
        cached = self.random.choice([None, 0, 10_000])
        served_by = f"w{self.random.randrange(7)}" if self.random.random() < 0.1 else ""
        self.over(name)
        self.closing = name
        self.step(RequestEnded(name, end, cached, 5, served_by, "why"))
        self.closing = ""

    def fail(self) -> None:
        name = self._any_sent()
        if name is None:
            return
        failure = self.random.choice(list(Failure))
        if name in self.raced:
            self.race_over(name, self.raced[name], failure)
        command, leg = self.sent[name], Leg.DECODE
        if command.prefill_worker and name not in self.prefilled | self.begun:
            leg = self.random.choice(list(Leg))
        self._fail(name, leg, failure, is_claim=self.random.random() < 0.1)

    def _fail(self, name: str, leg: Leg, failure: Failure, *, is_claim: bool = False) -> None:
        command = self.sent[name]
        worker = command.prefill_worker if leg is Leg.PREFILL else command.worker
        assert worker is not None
        lack = self.random.choice([None, *Lack, Lack.MEDIA]) if failure is Failure.REFUSED else None
        has_streamed = name in self.begun
        self.leg_failed(
            worker, LegFailed(name, leg, Fault(failure, lack, "why"), has_streamed, is_claim)
        )

    # Workers

    def worker(self) -> None:
        number = self.random.randrange(6)
        if f"w{number}" in self.specs and self.random.random() < 0.6:
            self._leave(f"w{number}")
        else:
            self._join(number)

    def _leave(self, worker: str) -> None:
        del self.specs[worker], self.known[worker]
        self.step(WorkerLeft(worker))
        for name, second in list(self.raced.items()):
            if name in self.raced and worker in (second, self.sent[name].worker):
                self.race_over(name, worker, Failure.BROKEN)
        self._lose(worker, Failure.BROKEN)

    def _lose(self, worker: str, failure: Failure) -> None:
        """Legs at a worker fail on their own."""
        for name, command in list(self.sent.items()):
            if self.sent.get(name) is not command:
                continue  # over by an event before, or elsewhere
            is_prefilled = name in self.begun | self.prefilled
            if worker == command.worker:
                self._fail(name, Leg.DECODE, failure)
            elif worker == command.prefill_worker and not is_prefilled:
                self._fail(name, Leg.PREFILL, failure)

    def _join(self, number: int) -> None:
        name = f"w{number}"
        role = WorkerRole.BOTH
        if self.has_prefillers:
            role = WorkerRole.PREFILL if number % 3 == 2 else WorkerRole.DECODE
        if self.is_flexible:
            role = WorkerRole.ANY
        contexts = self.random.choice([{}, {}, {"m": 8000}, {"m": 30_000}])
        self.specs[name] = spec(
            number, memory_tokens=MEMORY_TOKENS, role=role, context_tokens=contexts
        )
        self.known.setdefault(name, Known())
        self.step(Joined(self.specs[name]))

    def judge(self) -> None:
        worker, is_red = f"w{self.random.randrange(7)}", self.random.random() < 0.3
        if worker in self.specs:
            self.specs[worker] = msgspec.structs.replace(self.specs[worker], is_red=is_red)
            self.step(Joined(self.specs[worker]))

    def probe(self) -> None:
        result = self.random.choice([*ProbeResult, ProbeResult.ANSWERED, ProbeResult.ANSWERED])
        self._probe(f"w{self.random.randrange(7)}", result)

    def _probe(self, worker: str, result: ProbeResult) -> None:
        is_silent = result is ProbeResult.SILENT
        if (known := self.known.get(worker)) is not None and result is not ProbeResult.LATE:
            if known.is_down and result is ProbeResult.ANSWERED:
                known.without_media = False
            known.probe = result
        self.silent = worker if is_silent else ""
        late_s = self.random.choice([0.0, 0.5, 8.0]) if result is not ProbeResult.LATE else 3.0
        self.step(Probed(worker, result, result.value, late_s))
        self.silent = ""
        for each in self.given_up:
            self._give_up_at(each)
        self.given_up.clear()

    def _give_up_at(self, worker: str) -> None:
        """What a shell does: those without a first byte end."""
        for name in sorted(self.sent.keys() - self.begun):
            if name not in self.sent:
                continue
            if name in self.raced and worker in (self.raced[name], self.sent[name].worker):
                self.race_over(name, worker, Failure.SILENT)
            elif self.sent[name].worker == worker:
                self._fail(name, Leg.DECODE, Failure.SILENT)

    def assign(self) -> None:
        if self.specs and self.is_flexible:
            role = self.random.choice([WorkerRole.PREFILL, WorkerRole.BOTH])
            self.core.fleet.assign(self.random.choice(sorted(self.specs)), role)

    def scrape(self) -> None:
        worker = f"w{self.random.randrange(7)}"
        sample = LoadSample(
            waiting=self.random.choice([None, 0, 0, 1, 3]),
            running=self.random.choice([None, 0, 2]),
            memory_used=self.random.choice([None, 0.1, 0.5, 0.97]),
        )
        self._scrape(worker, sample, max(0, self.now_ns - self.random.choice([0, 1, 20 * MS, S])))

    def _scrape(self, worker: str, sample: LoadSample, asked_ns: int) -> None:
        if sample.waiting == 0 and sample.running is not None:
            for name, command in self.sent.items():
                if command.worker == worker and self.tried[name].sent_ns < asked_ns:
                    self.tried[name].may_begin = True
        self.step(Scraped(worker, sample, asked_ns))

    def share(self) -> None:
        loads = tuple(
            EngineLoad(f"w{self.random.randrange(7)}", 0, self.random.randrange(9000), 1)
            for _ in range(self.random.randrange(3))
        )
        self.step(Shared(self.random.choice("op"), loads))

    def tick(self) -> None:
        self.answer_prepares()
        self.step(RouteTick())

    def answer_prepares(self) -> None:
        """Some of them."""
        self.random.shuffle(self.prepares)
        while self.prepares and self.random.random() < 0.8:
            number = self.prepares.pop().number
            trouble = self.random.choice(["", "", "short"])
            self.step(PrepareAnswered(number, PrepareReply(1, 2, 3, trouble)))

    def adopt(self, *, is_draining: bool = True) -> None:
        self.step(RouteTick())  # time passes
        self.policy = self._policy(is_draining=is_draining)
        self.take(self.core.adopt(self.policy, self.now_ns))

    # The end

    def abort(self) -> None:
        """All requests end."""
        self.answer_prepares()
        while self.requests:
            self.close(min(self.requests), Ending.ABORTED)

    def serve(self) -> None:
        """One worker leaves, all others are well, and nobody else is there: nothing may be left
        waiting, be it for the one that left."""
        for tried in self.tried.values():  # it may be long until they are routed
            tried.arrived_ns += ROUNDS_MAX * S
        if self.specs:
            self._leave(self.random.choice(sorted(self.specs)))
        if not any(each.role is not WorkerRole.PREFILL for each in self.specs.values()):
            self._join(0)
        self.adopt(is_draining=False)
        for router in "op":
            self.step(Shared(router, ()))
        for _ in range(ROUNDS_MAX):
            self.now_ns += S
            for worker in sorted(self.specs):
                self._probe(worker, ProbeResult.ANSWERED)
                idle = LoadSample(waiting=0, running=0, memory_used=0.0)
                self._scrape(worker, idle, self.now_ns - MS)
            self.tick()
            if not self.requests:
                return
            for name, command in list(self.sent.items()):
                self._serve(name, command)
        raise AssertionError("these wait for ever: " + ", ".join(sorted(self.requests)))

    def _serve(self, name: str, command: Routed) -> None:
        if self.sent.get(name) is not command:
            return
        if name in self.raced:
            self.race_over(name, self.raced[name], None)
        self.close(name, Ending.DONE)
