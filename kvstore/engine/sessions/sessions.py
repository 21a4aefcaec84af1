"""Sessions: attaching, opening and closing, and the return of slots (ADR 3).

Covers Hello, Quiet, the end of sockets and processes. Does not cover: credits (`stores`).
"""

from __future__ import annotations

from kvstore.engine.events import Admit, Follow, Hangup, Release, Send, Unfollow
from kvstore.engine.memory.slots import SlotState
from kvstore.engine.sessions.owners import Connection, Owner, OwnerGroup, Refusal, asker, objection
from kvstore.engine.state import KnownSpace, State
from kvstore.errors import ProtocolError
from kvstore.types import ConnectionId, EngineSource, SpaceId
from kvstore.wire import messages as wire
from kvstore.wire.space import GROUPS_MAX, ShardColumn, Slab, Space, fingerprint


class Sessions:
    """Attaches processes of engines, opens and closes sessions, and detaches processes."""

    def __init__(self, state: State) -> None:
        self._state = state
        # No number of an earlier incarnation may come again: a rank could be quiet for it already,
        # and a plan of the old session, late in its engine, would pass for one of the new.
        self._next_session = (state.config.incarnation & 0x7F_FFFF_FFFF) << 24 | GROUPS_MAX

    def hello(
        self, id: ConnectionId, hello: wire.HelloScheduler | wire.HelloRank, process: int = 0
    ) -> None:
        """Attach a process, or refuse it. If its engine is complete with it, a session is begun.
        `process`: as in `events.Received`."""
        reason, permanent, is_full = "", False, False
        most = self._state.config.connection_count_max
        replaced = self._attached_as(hello)
        if hello.protocol != wire.PROTOCOL_VERSION:
            permanent = True
            reason = (
                f"this node speaks attach protocol {wire.PROTOCOL_VERSION}, the engine "
                f"{hello.protocol}: install the same kvstore version on both"
            )
        elif replaced is not None and replaced.hello.process != hello.process:
            # Both would attach again for ever, each in place of the other. The end of the first
            # lets the second in.
            reason = (
                f"another process or connector is attached as this engine's {replaced.role}: name "
                'KVStoreConnector once in "connectors" of --kv-transfer-config'
            )
        elif sum(each is not replaced for each in self._state.attached()) >= most:
            is_full = True
            reason = f"{most} connections are attached already"
        key = (hello.tenant, hello.engine_id, hello.nonce)
        if reason:
            self._state.refusals[key] = Refusal(reason, self._state.now_ns, is_full)
            self._refuse(id, reason, permanent=permanent)
            self._state.say(Release(id))
            return
        owner = self._state.owners.setdefault(key, Owner(key))
        connection = Connection(id, hello, owner)
        self._state.connections[id] = connection
        self._state.slots.pins.join_engine(id, key, process or id)
        if replaced is not None:
            self._state.say(Hangup(replaced.id, f"the {replaced.role} attached again"))
            self.ended(replaced.id)
        if isinstance(hello, wire.HelloRank):
            self._rank_is_quiet_again(owner, hello)
            owner.ranks[hello.rank] = connection
        else:
            owner.scheduler = connection
            owner.unserved, owner.waits_since_ns = "", self._state.now_ns
        self._state.owners[key] = owner
        welcome = wire.Welcome(
            protocol=wire.PROTOCOL_VERSION,
            incarnation=self._state.config.incarnation,
            now_ns=self._state.now_ns,
            arena_bytes=self._state.config.arena_bytes,
            generation_bytes=self._state.config.generation_bytes,
            hbm=_slab_for(hello, self._state.config.hbm),
        )
        self._state.say(Admit(id, welcome, isinstance(hello, wire.HelloRank)))
        self._form(owner)

    def _attached_as(self, hello: wire.HelloScheduler | wire.HelloRank) -> Connection | None:
        """The attached connection that this Hello asks to replace: the same engine's scheduler or
        rank. None: there is none."""
        owner = self._state.owners.get((hello.tenant, hello.engine_id, hello.nonce))
        if owner is None or isinstance(hello, wire.HelloScheduler):
            return None if owner is None else owner.scheduler
        return owner.ranks.get(hello.rank)

    def _refuse(self, id: ConnectionId, reason: str, *, permanent: bool) -> None:
        self._state.counters.protocol_refusals += 1
        self._state.say(Send(id, wire.Refused(reason=reason, permanent=permanent)))
        self._state.say(Hangup(id, reason))

    def _rank_is_quiet_again(self, owner: Owner, hello: wire.HelloRank) -> None:
        """Free the slots of ended connections of this rank and process: its new Hello shows that no
        copy of the process still writes."""
        its = hello.rank, hello.process
        for old in list(self._state.connections.values()):
            then = old.hello
            same = isinstance(then, wire.HelloRank) and (then.rank, then.process) == its
            if same and old.ended and old.owner.key == owner.key:
                self._state.free(self._state.slots.of_writer(old.id))
                self._forget(old)

    def _form(self, owner: Owner) -> None:
        """If all processes of an engine are attached and fit together, ask the ranks to be quiet
        for a new session. If they do not fit, refuse them all."""
        scheduler = owner.scheduler
        if scheduler is None or not owner.is_complete:
            return
        reason = objection(owner, slab_bytes=self._state.config.slab_bytes)
        if reason:
            self._state.refusals[owner.key] = Refusal(reason, self._state.now_ns)
            for connection in [scheduler, *owner.ranks.values()]:
                self._refuse(connection.id, reason, permanent=True)
                self.ended(connection.id)
            return
        self._quiesce(owner, owner.hello.weights_epoch)

    def _quiesce(self, owner: Owner, weights_epoch: str) -> None:
        owner.forming = self._next_session
        self._next_session += GROUPS_MAX  # slots carry session + group
        groups = max((len(hello.groups) for hello in owner.rank_hellos()), default=0)
        columns = [owner.columns(group) for group in range(groups)]
        for rank in owner.ranks.values():
            assert isinstance(rank.hello, wire.HelloRank)
            rank.asked_session = owner.forming
            parts = tuple(
                ShardColumn([*its].index(group.shard), writes=its[group.shard] is rank.hello)
                for its, group in zip(columns, rank.hello.groups, strict=False)
            )
            self._state.send(rank, wire.Quiesce(owner.forming, weights_epoch, columns=parts))

    def quiet(self, connection: Connection, session: int) -> None:
        """Free the rank's slots of earlier sessions; open the session when all ranks are quiet.
        Raises ProtocolError."""
        if session > connection.asked_session:
            raise ProtocolError("a Quiet for a session that nobody asked for")
        if session <= connection.quiet_session:
            raise ProtocolError("a Quiet for a session that it was quiet for already")
        connection.quiet_session = session
        if session < connection.asked_session:
            return  # it was asked again meanwhile: its slots come back with that answer
        mine = self._state.slots.of_writer(connection.id)
        self._state.free(mine[self._state.slots.session[mine] < session])
        owner = connection.owner
        if (
            session == owner.forming
            and owner.is_complete
            and all(rank.quiet_session == session for rank in owner.ranks.values())
        ):
            self._open(owner)

    def _open(self, owner: Owner) -> None:
        scheduler, hello = owner.scheduler, owner.hello
        assert scheduler is not None
        self._state.forget_unused_scopes()
        spaces = [group.space for group in owner.rank_hellos()[0].groups]
        owner.groups = tuple(
            self._group(owner, hello, index, space) for index, space in enumerate(spaces)
        )
        first = owner.groups[0].asker
        self._follow(scheduler.id, hello, spaces[0], first.space)
        owner.open_session, owner.forming, owner.unserved = owner.forming, 0, ""
        self._state.refusals.pop(owner.key, None)
        self._state.counters.sessions_opened += 1
        self._state.credits_due = True
        pace = self._state.paces.of(*first.address)
        opened = wire.SessionOpen(
            session=owner.open_session,
            shard_counts=tuple(len(group.writers) for group in owner.groups),
            compute_ns_per_token=pace.compute_ns_per_token,
            load_ns_per_token=pace.load_ns_per_token,
            node=self._state.config.node,
        )
        self._state.send(scheduler, opened)

    def _group(
        self, owner: Owner, hello: wire.HelloScheduler, index: int, space: Space
    ) -> OwnerGroup:
        # The columns that Quiesce told the ranks: an arrival or end since then ended `forming`.
        columns, state, tenant = owner.columns(index), self._state, owner.key[0]
        address = tenant, fingerprint(space, weights_epoch=hello.weights_epoch)
        its = asker(
            address,
            space,
            [(shard, state.residency.scope(*address, shard)) for shard in columns],
            quota=state.slots.quotas.group(label=hello.label, tenant=tenant),
            engine="/".join(owner.key),
            title=owner.title,
        )
        for size in its.slot_sizes:
            state.slots.pool(size)
        state.know(address, KnownSpace(space, its.scopes, hello.label))
        writers = tuple(writer.rank for writer in columns.values())
        here = {
            hello.groups[index].shard
            for hello in owner.rank_hellos()
            if _slab_for(hello, state.config.hbm) is not None
        }
        on_gpu = tuple(shard in here for shard in columns) if here else ()
        return OwnerGroup(owner, its, writers, owner.forming + index, on_gpu)

    def _follow(
        self, id: ConnectionId, hello: wire.HelloScheduler, space: Space, space_id: SpaceId
    ) -> None:
        if self._state.config.follows and hello.events:
            source = EngineSource(
                engine=hello.engine_id,
                rank=hello.data_rank,
                endpoint=hello.events,
                replay_endpoint=hello.events_replay,
                tenant=hello.tenant,
                space=space_id,
                hash_seed=space.hash_seed,
                block_tokens=space.block_tokens,
                names_are_keys=True,
            )
            self._state.say(Follow(id, source))

    def ended(self, id: ConnectionId) -> None:
        connection = self._state.connections.get(id)
        if connection is None or connection.ended:
            if connection is None:
                self._state.say(Release(id))
            return
        connection.ended = True
        owner = connection.owner
        self._close_session(owner, f"the {connection.role} detached")
        if isinstance(connection.hello, wire.HelloScheduler):
            if self._state.config.follows and connection.hello.events:
                self._state.say(Unfollow(id))
            if owner.scheduler is connection:
                owner.scheduler = None
                # Nobody will bind these credits any more: let the ranks give them back.
                self._quiesce(owner, "")
        else:
            rank = connection.hello.rank
            if owner.ranks.get(rank) is connection:
                del owner.ranks[rank]
            mine = self._state.slots.of_writer(id)
            granted = mine[self._state.slots.state[mine] == SlotState.GRANTED]
            self._state.slots.lose(granted)
            self._state.counters.slots_quarantined += len(granted)
        if len(self._state.slots.of_writer(id)) == 0:
            self._forget(connection)
        if owner.is_empty and self._state.owners.get(owner.key) is owner:
            del self._state.owners[owner.key]

    def exited(self, id: ConnectionId) -> None:
        connection = self._state.connections.get(id)
        if connection is None:
            return
        if not connection.ended:
            # A forked grandchild may hold the socket open; the process is gone all the same.
            self._state.say(Hangup(id, "its process is gone"))
            self.ended(id)
        self._state.free(self._state.slots.of_writer(id))
        if id in self._state.connections:
            self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        del self._state.connections[connection.id]
        self._state.slots.pins.leave(connection.id)
        self._state.say(Release(connection.id))

    def _close_session(self, owner: Owner, reason: str) -> None:
        owner.forming = 0
        if not owner.open_session:
            return
        self._state.leases.end_session(owner.open_session)
        self._state.credits_due = True
        if owner.scheduler is not None:
            closed = wire.SessionClosed(session=owner.open_session, reason=reason)
            self._state.send(owner.scheduler, closed)
        owner.open_session = 0
        for group in owner.groups:
            group.granted_slots = 0
        owner.waits_since_ns = self._state.now_ns

    def hang_up(self, connection: Connection, reason: str) -> None:
        self._state.counters.protocol_refusals += 1
        if not connection.ended:
            self._state.say(Hangup(connection.id, reason))
            self.ended(connection.id)


def _slab_for(hello: wire.HelloScheduler | wire.HelloRank, slab: Slab | None) -> Slab | None:
    """The hbm slab, if this Hello is from a rank on the slab's GPU; else None."""
    is_there = isinstance(hello, wire.HelloRank) and slab is not None and hello.gpu == slab.gpu
    return slab if is_there else None
