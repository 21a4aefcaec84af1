"""A seeded walk of a core through a fleet that comes, goes, fails and lies, beside an oracle.

The oracle keeps what a shell would: which requests arrived, which command each got, how many
requests each worker has. It raises AssertionError as soon as the core breaks a rule:

1. Each request gets one final word, and nothing after it.
2. No worker is over its bounds, and none that is down, draining or gone gets a request.
3. A subset is kept to; a worker that failed, and was not just slow, is not tried again for the
   same request; of two attempts in a race no word comes from the one that is over.
4. Low classes are not routed past an urgent one that waits in the same pool.
5. Preparations go to workers that are there, are bounded, and are for keys of their request.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec

from kvstore.routing.core import RouterCore
from kvstore.routing.decide import replay
from kvstore.routing.events import (
    Arrived,
    Ending,
    Failure,
    FirstToken,
    Joined,
    Judged,
    Late,
    Leg,
    LegFailed,
    PrefillDone,
    Prepare,
    PrepareAnswered,
    PrepareReason,
    Raced,
    RaceOver,
    Rejected,
    RequestEnded,
    RequestHeld,
    Routed,
    RouteEvent,
    RouteTick,
    Scraped,
    Shared,
    WorkerLeft,
)
from kvstore.routing.policy import POLICY_NAMES, RoutingPolicy, parse
from kvstore.routing.receipts import Receipt
from kvstore.routing.values import (
    LoadSample,
    PrefixAnswer,
    PrefixMatch,
    PrefixTrust,
    RouteRequest,
    SharedLoad,
    WorkerHealth,
    WorkerRole,
    WorkerSpec,
)
from tests.unit.routing.fleets import MS, keys, request, spec

QUEUE_MAX = 3
RUNNING_MAX = 6
MEMORY_TOKENS = 40_000
OPEN_MAX = 5
CLASSES = ("inline", "interactive", "tolerant", "batch")


class Walk:
    """One walk."""

    def __init__(self, seed: int, *, has_prefillers: bool | None = None) -> None:
        self.random = random.Random(seed)
        self.more = random.Random(-seed)
        """Of what was added later: the walks stay as they were."""
        self.prepares: list[Prepare] = []
        """Without an answer."""
        self.every: dict[str, RouteRequest] = {}
        self.prepared = Counter[PrepareReason]()
        self.policy = self._policy()
        self.core = RouterCore(self.policy, seed=seed)
        self.now_ns = 1
        self.specs: dict[str, WorkerSpec] = {}
        self.health: dict[str, WorkerHealth] = {}
        self.requests: dict[str, RouteRequest] = {}
        """Those that may still get a command."""
        self.waiting: set[str] = set()
        self.sent: dict[str, Routed] = {}
        self.raced: dict[str, str] = {}
        """Second worker of those in a race."""
        self.race_count = Counter[str]()
        self.begun: set[str] = set()
        self.prefilled: set[str] = set()
        self.failed: dict[str, set[str]] = {}
        self.final = Counter[str]()
        self.arrived = 0
        self.has_prefillers = (
            self.random.random() < 0.5 if has_prefillers is None else has_prefillers
        )
        self.is_flexible = self.random.random() < 0.3
        for number in range(4):
            self._join(number)

    def _policy(self) -> RoutingPolicy:
        return parse(
            {
                "policy": self.random.choice([*POLICY_NAMES, "cost", "cost"]),
                "limits": {
                    "queue_max": QUEUE_MAX,
                    "running_max": RUNNING_MAX,
                    "held_max": 12,
                    "holds_without_workers": self.random.random() < 0.5,
                },
                "classes": {
                    "inline": {"rank": 0, "queue_max": 4, "ttl_s": 1, "ttft_s": 2},
                    "interactive": {"rank": 1, "queue_max": 6, "ttl_s": 5, "yield_s": 0.3},
                    "tolerant": {"rank": 2, "queue_max": 6, "ttl_s": 20, "saturation_max": 0.9},
                    "batch": {"rank": 3, "queue_max": 20, "ttl_s": 60, "backlog_s": 0.5},
                },
                "ahead": {
                    "open_max": OPEN_MAX,
                    "hot_requests": 3,
                    "pins_per_tenant": 2,
                    "touch_s": 0.1,
                },
                "tree_blocks_max": 40,
                "receipt_workers_max": 5,
                "races": {"is_on": True, "after_s_min": 0.001, "burst": 1000},
            }
        )

    def run(self, steps: int) -> None:
        """Random events, then everything ends; the core must be empty."""
        for _ in range(steps):
            self.now_ns += self.random.choice([0, MS, 20 * MS, 300 * MS])
            self.one()
        self.end()

    def one(self) -> None:
        """One random event."""
        actions = {
            self.arrive: 10,
            self.first_token: 5,
            self.finish: 6,
            self.fail: 3,
            self.late: 3,
            self.race_over: 1,
            self.prefill_done: 3,
            self.tick: 3,
            self.worker: 1,
            self.judge: 1,
            self.scrape: 1,
            self.share: 1,
            self.adopt: 0.2,
            self.assign: 1,
        }
        self.random.choices(list(actions), list(actions.values()))[0]()

    def step(self, event: RouteEvent) -> None:
        self.take(self.core.step(event, self.now_ns))

    def take(self, commands: list[Any]) -> None:
        for command in commands:
            if isinstance(command, Prepare):
                self._prepare(command)
                continue
            name = command.request_id
            assert name in self.requests, "a command after the final word, or for nobody"
            match command:
                case Routed():
                    self._routed(command)
                case Raced():
                    self._raced(command)
                case RequestHeld():
                    assert name not in self.sent
                    self.waiting.add(name)
                case Rejected():
                    self._over(name)
        self.core.check()
        self._bounds()

    def _prepare(self, command: Prepare) -> None:
        assert command.worker in self.specs, "prepared at nobody"
        if command.reason is not PrepareReason.PINNED:
            its = self.every[command.request_id]
            assert command.keys
            assert command.keys in its.keys
        self.prepared[command.reason] += 1
        self.prepares.append(command)
        assert len(self.prepares) <= OPEN_MAX

    def answer_prepares(self) -> None:
        """Some of them."""
        self.more.shuffle(self.prepares)
        while self.prepares and self.more.random() < 0.8:
            number = self.prepares.pop().number
            trouble = self.more.choice(["", "", "short"])
            self.step(PrepareAnswered(number, 1, 2, 3, trouble))

    def _routed(self, command: Routed) -> None:
        name = command.request_id
        assert name not in self.sent, "routed twice without a failure between"
        its = self.requests[name]
        for worker in (command.worker, command.prefill_worker):
            if worker is None:
                continue
            assert worker in self.specs, "routed to nobody"
            assert self.health[worker] is WorkerHealth.UP
            assert worker not in self.failed.get(name, ()), "tried again where it failed"
            role = self.core.fleet.workers[self.core.fleet.row_of[worker]].role
            if worker is command.prefill_worker:
                assert role is WorkerRole.PREFILL
            elif role is WorkerRole.PREFILL:
                assert self.is_flexible
                assert command.prefill_worker is None
            if its.subset is not None:
                assert worker in its.subset
        rank = self.policy.classes[command.receipt.service].rank
        if command.attempt == 1 and command.prefill_worker is None:
            for other in self.waiting - {name}:
                held = self.core.open[other]
                its_rank = self.policy.classes[held.service].rank
                has_lanes = self.has_prefillers or self.is_flexible
                is_plain = held.request.subset is None and not has_lanes
                assert its_rank >= rank or not is_plain, "routed past a more urgent one"
        if len(self.specs) <= 5:  # then the receipt has all of them
            assert replay(command.receipt, self.policy).chosen == command.worker
        self.waiting.discard(name)
        self.sent[name] = command

    def _raced(self, command: Raced) -> None:
        name, worker = command.request_id, command.worker
        self.race_count[name] += 1
        assert self.race_count[name] == 1, "raced twice"
        assert name in self.sent.keys() - self.begun
        first, its = self.sent[name], self.requests[name]
        assert first.prefill_worker is None
        assert not its.has_side_effects
        assert worker != first.worker
        assert self.health[worker] is WorkerHealth.UP
        assert self.specs[worker].role is not WorkerRole.PREFILL
        assert worker not in self.failed.get(name, ())
        assert its.subset is None or worker in its.subset
        self.raced[name] = worker

    def _race_over(self, name: str, loser: str, failure: Failure | None) -> None:
        winner = self.raced.pop(name)
        if loser == self.sent[name].worker:
            self.sent[name] = msgspec.structs.replace(self.sent[name], worker=winner)
        if failure is not None:
            self._failed_at(name, loser, failure)
        self.step(RaceOver(name, loser, failure))

    def _failed_at(self, name: str, worker: str, failure: Failure) -> None:
        if failure is not Failure.TIMEOUT:
            self.failed.setdefault(name, set()).add(worker)

    def _over(self, name: str) -> None:
        self.final[name] += 1
        assert self.final[name] == 1
        del self.requests[name]
        self.waiting.discard(name)
        self.sent.pop(name, None)
        self.raced.pop(name, None)
        self.begun.discard(name)
        self.prefilled.discard(name)

    def _bounds(self) -> None:
        queued, running, tokens = Counter[str](), Counter[str](), Counter[str]()
        for name, command in self.sent.items():
            running[command.worker] += 1
            queued[command.worker] += name not in self.begun
            tokens[command.worker] += self.requests[name].prompt_tokens
            if command.prefill_worker and name not in self.begun | self.prefilled:
                running[command.prefill_worker] += 1
                queued[command.prefill_worker] += 1
        for worker in self.raced.values():
            running[worker] += 1
            queued[worker] += 1
        assert max(queued.values(), default=0) <= QUEUE_MAX
        assert max(running.values(), default=0) <= RUNNING_MAX
        assert len(self.core.room) <= 12
        assert self.waiting == self.core.room.entries.keys()
        assert self.requests.keys() == self.core.open.keys()

    # Events

    def arrive(self) -> None:
        self.arrived += 1
        name = f"r{self.arrived}"
        tokens = self.random.choice([40, 300, 1000, 6000, 20_000])
        subset = None
        if self.specs and self.random.random() < 0.1:
            subset = tuple(self.random.sample(list(self.specs), 1))
        its = request(
            name,
            tokens,
            keys=keys(self.random.choice("abc"), min(60, tokens // 512)),
            block_tokens=512,
            service=self.random.choice([*CLASSES, ""]),
            tenant=self.random.choice("xyz"),
            session=self.random.choice(["", "s1", "s2"]),
            priority=self.random.choice([0, 0, 1]),
            subset=subset,
            output_tokens_max=self.random.choice([10, 400]),
            pin_s=self.more.choice([0, 0, 1, 900]),
            ends_session=self.more.random() < 0.1,
            has_side_effects=self.random.random() < 0.3,
        )
        self.requests[name] = self.every[name] = its
        self.step(Arrived(its, self._prefix(its)))

    def _prefix(self, its: RouteRequest) -> PrefixAnswer | None:
        if self.random.random() < 0.3:
            return None
        blocks = len(its.keys) // 32
        matches = tuple(
            PrefixMatch(
                f"n{self.random.randrange(6)}",
                self.random.choice(["e", ""]),
                0,
                self.random.randint(0, blocks),
                self.random.randint(0, blocks),
                self.random.randint(0, blocks),
                self.random.choice(list(PrefixTrust)),
            )
            for _ in range(self.random.randrange(5))
        )
        return PrefixAnswer(PrefixTrust.CATCHING_UP, matches, 1)

    def _any_sent(self) -> str | None:
        return self.random.choice(sorted(self.sent)) if self.sent else None

    def first_token(self) -> None:
        if (name := self._any_sent()) is not None:
            if name in self.raced:
                self.race_over(name)
            self.begun.add(name)
            self.step(FirstToken(name))

    def assign(self) -> None:
        if self.specs and self.is_flexible:
            role = self.random.choice([WorkerRole.PREFILL, WorkerRole.BOTH])
            self.core.fleet.assign(self.random.choice(sorted(self.specs)), role)

    def late(self) -> None:
        name = self._any_sent()
        if name is not None and name not in self.begun:
            self.step(Late(name))

    def race_over(self, name: str = "") -> None:
        if name or self.raced:
            name = name or self.random.choice(sorted(self.raced))
            loser = self.random.choice([self.sent[name].worker, self.raced[name]])
            self._race_over(name, loser, self.random.choice([None, *Failure]))

    def prefill_done(self) -> None:
        name = self._any_sent()
        if name is not None and self.sent[name].prefill_worker:
            self.prefilled.add(name)
            self.step(PrefillDone(name))

    def finish(self) -> None:
        names = sorted(self.requests)
        if names:
            name = self.random.choice(names)
            is_one = name in self.sent.keys() - self.raced.keys()
            end = self.random.choice(list(Ending)) if is_one else Ending.ABORTED
            cached = self.random.choice([None, 0, 10_000])
            self._over(name)
            self.step(RequestEnded(name, end, cached, 5))

    def fail(self) -> None:
        name = self._any_sent()
        if name is None:
            return
        failure = self.random.choice(list(Failure))
        if name in self.raced:
            self._race_over(name, self.raced[name], failure)
        command = self.sent[name]
        leg = Leg.DECODE
        if command.prefill_worker and name not in self.prefilled | self.begun:
            leg = self.random.choice(list(Leg))
        worker = command.prefill_worker if leg is Leg.PREFILL else command.worker
        assert worker is not None
        self._failed_at(name, worker, failure)
        has_streamed = name in self.begun
        del self.sent[name]
        self.prefilled.discard(name)
        self.step(LegFailed(name, leg, failure, has_streamed))
        assert name not in self.requests or name in self.sent or name in self.waiting

    def tick(self) -> None:
        self.answer_prepares()
        self.step(RouteTick())

    def worker(self) -> None:
        number = self.random.randrange(6)
        if f"w{number}" in self.specs and self.random.random() < 0.6:
            del self.specs[f"w{number}"]
            del self.health[f"w{number}"]
            self.step(WorkerLeft(f"w{number}"))
            for name, second in list(self.raced.items()):
                if f"w{number}" in (second, self.sent[name].worker):
                    self._race_over(name, f"w{number}", Failure.BROKEN)
            for name, command in list(self.sent.items()):
                if f"w{number}" in (command.worker, command.prefill_worker):
                    self._lost(name, command, f"w{number}")
        else:
            self._join(number)

    def _lost(self, name: str, command: Routed, worker: str) -> None:
        if name not in self.sent:
            return  # over by an event before
        leg = Leg.DECODE if command.worker == worker else Leg.PREFILL
        if leg is Leg.PREFILL and name in self.begun | self.prefilled:
            return
        del self.sent[name]
        self.prefilled.discard(name)
        self.step(LegFailed(name, leg, Failure.BROKEN, name in self.begun))

    def _join(self, number: int) -> None:
        name = f"w{number}"
        role = WorkerRole.BOTH
        if self.has_prefillers:
            role = WorkerRole.PREFILL if number % 3 == 2 else WorkerRole.DECODE
        if self.is_flexible:
            role = WorkerRole.ANY
        self.specs[name] = spec(number, memory_tokens=MEMORY_TOKENS, role=role)
        self.health.setdefault(name, WorkerHealth.UP)
        self.step(Joined(self.specs[name]))

    def judge(self) -> None:
        if self.specs:
            worker = self.random.choice(sorted(self.specs))
            self.health[worker] = self.random.choice([*WorkerHealth, WorkerHealth.UP])
            self.step(Judged(worker, self.health[worker], self.random.random() < 0.2))

    def scrape(self) -> None:
        worker = f"w{self.random.randrange(7)}"
        sample = LoadSample(
            waiting=self.random.choice([None, 0, 1]),
            running=self.random.choice([None, 0, 2]),
            memory_used=self.random.choice([None, 0.1, 0.5]),
        )
        self.step(Scraped(worker, sample))

    def share(self) -> None:
        loads = tuple(
            SharedLoad(f"w{self.random.randrange(7)}", self.random.randrange(9000), 1)
            for _ in range(self.random.randrange(3))
        )
        self.step(Shared(self.random.choice("op"), loads))

    def adopt(self) -> None:
        self.policy = self._policy()
        self.take(self.core.adopt(self.policy, self.now_ns))

    def end(self) -> None:
        """All requests end; nothing is left."""
        self.answer_prepares()
        while self.requests:
            name = min(self.requests)
            self._over(name)
            self.step(RequestEnded(name, Ending.ABORTED))
        assert self.final.total() == self.arrived
        assert not self.core.fleet.flights
        assert not self.core.room.entries
        receipts = [draft.receipt() for draft in self.core.take_drafts()]
        assert msgspec.json.decode(msgspec.json.encode(receipts), type=list[Receipt]) == receipts
