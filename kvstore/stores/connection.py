"""The way to a Redis or Valkey: connections, deadlines, failures.

    reachable ─(any failure)─▶ unreachable: only `poll` goes on ─(an answer)─▶ reachable

There are no retries: a step that may have been done must not be done again, and a late answer is of
no use. One line of the log for each change.

Covers: the client library. Does not cover: queries and steps (`redis`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from redis.asyncio import Redis
from redis.asyncio.connection import (
    BlockingConnectionPool,
    Connection as PlainConnection,
    SSLConnection,
)
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from kvstore.errors import ConfigError, ProtocolError
from kvstore.stores import scripts
from kvstore.stores.address import StoreConfig


class Deadlines(NamedTuple):
    """Longest waits for a store."""

    read_s: float = 0.2
    """For the answer to a query: if it takes longer, the caller had better compute."""
    write_s: float = 2.0
    """For a step that writes: only the next step of the same node waits for it."""


DEADLINES: Final = Deadlines()
CONNECTIONS_MAX: Final = 32
PREFIX: Final = b"kvstore:1:"
"""Prefix of all keys, with the number of their layout: a version with another layout begins with an
empty store."""
FAILURES: Final = (RedisError, OSError, TimeoutError)
_REMEDIES: Final = {
    OutOfMemoryError: "Raise its maxmemory, or lower --entries.",
    ReadOnlyError: "Name its primary in --store.",
}
REFUSALS: Final = tuple(_REMEDIES)
"""Errors of a store that answers, but accepts no writes."""

_Argument = bytes | str
_log = logging.getLogger(__name__)


class StoreConnection:
    """Connection to one store. Unreachable until the first poll."""

    def __init__(self, config: StoreConfig, deadlines: Deadlines) -> None:
        self.is_away = True
        self.outage = ""
        """Why the store is unreachable; empty: it is not."""
        self.refusals = {"words": "", "ticks": ""}
        """Reasons why the store refused the last writes of updates and of ticks; empty: it did
        not."""
        self.failure_count = 0
        self.warning = ""
        """Warning about a wrong setting of a store that answers; empty: none."""
        self._place = config.place
        self._deadlines = deadlines
        self._has_scripts = False
        tls: dict[str, Any] = {"ssl_ca_certs": str(config.ca) if config.ca is not None else None}
        pool = BlockingConnectionPool(
            max_connections=CONNECTIONS_MAX,
            timeout=deadlines.write_s,
            connection_class=SSLConnection if config.tls else PlainConnection,
            host=config.host,
            port=config.port,
            db=config.database,
            username=config.username,
            password=config.password,
            protocol=2,
            client_name="kvstore-index",
            retry=Retry(NoBackoff(), 0),
            # Deadlines are of a whole call, and lie around it.
            socket_timeout=None,
            socket_connect_timeout=None,
            **(tls if config.tls else {}),
        )
        self._redis: Any = Redis.from_pool(pool)

    @property
    def trouble(self) -> str:
        """The first of: outage, refusals, warning; empty: there is none."""
        return next(filter(None, (self.outage, *self.refusals.values(), self.warning)), "")

    async def read(self, script: scripts.Script, *arguments: _Argument) -> Any:
        """Run a script that only reads; returns its answer. Raises FAILURES."""
        async with asyncio.timeout(self._deadlines.read_s):
            return await self._redis.evalsha(script.sha, 0, PREFIX, *arguments)

    async def write_all(
        self, script: scripts.Script, calls: Iterable[Sequence[_Argument]]
    ) -> list[int]:
        """Run a script with each of these arguments, in order, in one round trip; returns its
        answers. Raises FAILURES."""
        async with asyncio.timeout(self._deadlines.write_s), self._redis.pipeline(False) as steps:
            for arguments in calls:
                steps.evalsha(script.sha, 0, PREFIX, *arguments)
            return list(map(int, await _outcomes(steps)))

    async def ask(self, command: str, key: str, *arguments: str | int) -> Any:
        """Answer to one command about a key. Raises FAILURES."""
        async with asyncio.timeout(self._deadlines.write_s):
            return await self._redis.execute_command(command, PREFIX + key.encode(), *arguments)

    async def poll(self, epoch: bytes) -> tuple[list[Any], str, int]:
        """Run the script POLL, which proposes `epoch` to an empty store. Returns its answer, the
        server's run id, and the server's memory in bytes. Raises FAILURES."""
        async with asyncio.timeout(self._deadlines.read_s), self._redis.pipeline(False) as asked:
            if not self._has_scripts:
                for script in scripts.ALL:
                    asked.script_load(script.text)
            asked.evalsha(scripts.POLL.sha, 0, PREFIX, epoch)
            asked.info("server")
            asked.info("memory")
            *_, found, server, memory = await _outcomes(asked)
        self._has_scripts = True
        policy = str(memory.get("maxmemory_policy", ""))
        self.warning = ""
        if policy.startswith("allkeys") and memory.get("maxmemory"):
            self.warning = (
                f"the store at {self._place} drops entries when it is full"
                f" (maxmemory-policy {policy}): set noeviction"
            )
        return found, str(server.get("run_id", "")), int(memory.get("used_memory", 0))

    def lose(self, error: Exception) -> str:
        """Record a failure. If the store answers, but accepts no writes, returns the reason; any
        other failure makes the store unreachable and returns ""."""
        for kind, remedy in _REMEDIES.items():
            if isinstance(error, kind):
                return f"the store at {self._place} takes nothing: {error} {remedy}"
        reason = f"{type(error).__name__}: {error}" if str(error) else "no answer in time"
        if isinstance(error, NoScriptError):
            reason = "the scripts are gone"
        elif isinstance(error, ProtocolError):
            reason = f"{PREFIX.decode()} holds records of no replica: {error}"
        self._has_scripts = False
        if not self.is_away:
            self.failure_count += 1
        outage = f"the store at {self._place} is unreachable: {reason}"
        if outage != self.outage and not (self.is_away and self.outage):
            _log.warning("%s; answers are stale until it is back", outage)
        self.is_away, self.outage = True, outage
        return ""

    def refuse(self, what: str, reason: str) -> None:
        """Record whether the store refused writes of updates (`words`) or of ticks; an empty
        `reason`: it did not."""
        if reason and reason not in self.refusals.values():
            _log.warning("%s", reason)
        self.refusals[what] = reason

    def is_back(self) -> None:
        """The store answered a poll."""
        if self.outage:
            _log.info("the store at %s answers", self._place)
        self.is_away, self.outage = False, ""

    async def verify(self) -> None:
        """Connect at the start. The store may be unreachable, but must not refuse the credentials.

        Raises:
            ConfigError: the store refuses the credentials.
        """
        try:
            async with asyncio.timeout(self._deadlines.write_s):
                await self._redis.ping()
        except (AuthenticationError, ResponseError) as error:
            raise ConfigError(
                f"the store at {self._place} refuses: {error}; give its user in --store and its"
                " password with --store-password-file"
            ) from None
        except FAILURES as error:
            self.lose(error)

    async def close(self) -> None:
        """Close all connections."""
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()


async def _outcomes(pipeline: Any) -> list[Any]:
    """Outcomes of all commands. Raises the first error, without the command, which may be long."""
    outcomes: list[Any] = await pipeline.execute(raise_on_error=False)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes
