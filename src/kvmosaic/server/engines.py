"""Which engines are here: who declared what, who has mapped the arena, and what may be given away when.

An engine's holds (reservations, leases) outlive its sessions. They may be buried only when nobody can use them any
more: its scheduler's session is gone and every process that was given the arena for it is proven dead, has sent
Detach, or has declared again (which states that no copy of it is in flight). Until then the engine is quarantined.
Pure bookkeeping: no socket, no cache, no clock. Called by the service on the loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import xxhash

from kvmosaic.core.types import EngineKey, Namespace
from kvmosaic.errors import Refused
from kvmosaic.layout.groups import Declaration, Geometry
from kvmosaic.protocol.messages import Role
from kvmosaic.server.peers import Process

Compose = Callable[[Sequence[Declaration]], Geometry]
"""layout.objects.compose with the server's settings filled in; raises Refused."""


@dataclass(slots=True, eq=False)
class Session:
    """One connection. `role` is None before its Hello; `rank` is None until a worker has declared."""

    process: Process
    role: Role | None = None
    engine: Engine | None = None
    rank: int | None = None


@dataclass(slots=True)
class Rank:
    """What one process declared. `session` is None from the loss of its session until it declares again.

    `attached_to` is the namespace it was given the arena for: from then on it may have copies in flight.
    """

    declaration: Declaration
    process: Process
    session: Session | None
    epoch: int
    attached_to: bytes | None = None
    mapped: bool = False


class Engine:
    """All processes of one engine instance."""

    def __init__(self, key: EngineKey) -> None:
        self.key = key
        self.epoch = 0
        self.ranks: dict[int, Rank] = {}
        self.geometry: Geometry | None = None
        # What it computes with since its last clear; empty: as its ranks declared.
        self.weights = ""
        self.refusal: str | None = None
        self.logged_refusal: str | None = None
        self.sessions: list[Session] = []
        # A scheduler was here since the last burial, so there may be reservations or leases.
        self.may_hold = False

    @property
    def world(self) -> int:
        """How many ranks it has; 0 before the first one declared."""
        return max((rank.declaration.world for rank in self.ranks.values()), default=0)

    @property
    def namespace(self) -> Namespace | None:
        """Whom it shares objects with; None without a geometry."""
        if self.geometry is None:
            return None
        if not self.weights:
            return Namespace(self.geometry.namespace)
        return Namespace(xxhash.xxh3_128_digest(self.geometry.namespace + self.weights.encode()))

    @property
    def ready(self) -> bool:
        """All ranks have declared, agree and have mapped the arena."""
        return self.geometry is not None and all(r.mapped and r.session for r in self.ranks.values())

    @property
    def buriable(self) -> bool:
        """It may hold something, and nobody can use it."""
        return self.may_hold and not self._has_scheduler() and not self._may_copy()

    @property
    def quarantined(self) -> bool:
        """It may hold something that nobody will release, but somebody might still touch it."""
        return self.may_hold and not self._has_scheduler() and self._may_copy()

    @property
    def empty(self) -> bool:
        """Nobody has a session with it, and nothing has to wait for a process's death."""
        return not (self.sessions or self.may_hold or self._may_copy())

    def declared_ranks(self) -> tuple[int, ...]:
        """For a worker that waits: who has declared."""
        return tuple(sorted(number for number, rank in self.ranks.items() if rank.session))

    def mapped_ranks(self) -> tuple[int, ...]:
        """For a scheduler that waits: who has mapped the arena."""
        return tuple(number for number in self.declared_ranks() if self.ranks[number].mapped)

    def check(self) -> None:
        """A geometry needs every rank; a rank that mapped the arena was given it."""
        if self.geometry is not None:
            assert self.refusal is None
            assert sorted(self.ranks) == list(range(self.geometry.world))
        for number, rank in self.ranks.items():
            assert rank.epoch <= self.epoch
            assert rank.attached_to is not None or not rank.mapped
            assert rank.session is None or (rank.session in self.sessions and rank.session.rank == number)

    def _has_scheduler(self) -> bool:
        return any(session.role == "scheduler" for session in self.sessions)

    def _may_copy(self) -> bool:
        return any(rank.attached_to is not None for rank in self.ranks.values())


class Registry:
    """All engines with a session or with holds."""

    def __init__(self, compose: Compose) -> None:
        self._compose = compose
        self._engines: dict[EngineKey, Engine] = {}
        # One counter for all: an engine key that comes back never meets a plan of its earlier life.
        self._epochs = count(1)

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._engines.values()))

    def __len__(self) -> int:
        return len(self._engines)

    def join(self, session: Session, role: Role, key: EngineKey) -> None:
        """A session introduces itself. Refused, and nothing changed, when another process schedules this engine:
        two would fight over its leases."""
        engine = self._engines.get(key) or Engine(key)
        if role == "scheduler":
            for other in engine.sessions:
                if other.role == "scheduler" and other.process is not session.process:
                    raise Refused(
                        f"engine {key} already has a scheduler, {other.process}; {session.process} needs an "
                        "engine id of its own"
                    )
            engine.may_hold = True
        self._engines[key] = engine
        engine.sessions.append(session)
        session.role, session.engine = role, engine

    def declare(self, session: Session, declaration: Declaration) -> None:
        """Set what a rank holds; composes when it was the last one missing, see Engine.refusal for the outcome.

        Refused, and nothing changed, when the rank cannot be this process's.
        """
        engine, number = _engine_of(session), declaration.rank
        if not 0 <= number < declaration.world:
            raise Refused(f"rank {number} does not exist in a world of {declaration.world}")
        if session.rank not in (None, number):
            raise Refused(f"this session declared rank {session.rank} before, and now rank {number}")
        known = engine.ranks.get(number)
        if known is not None and known.process is not session.process:
            if not known.process.is_dead():
                raise Refused(
                    f"rank {number} of engine {engine.key} belongs to {known.process}, which is alive; "
                    f"{session.process} declared it too: give every engine instance an engine id of its own"
                )
            self.died(known.process)
        self._withdraw(engine, number)
        engine.epoch = next(self._epochs)
        engine.ranks[number] = Rank(declaration, session.process, session, engine.epoch)
        session.rank = number
        self._compose_when_complete(engine)

    def attach(self, session: Session) -> bool:
        """Whether the session's process may be given the arena, which it then counts as having."""
        engine, rank = _engine_of(session), _rank_of(session)
        if rank is None or engine.geometry is None:
            return False
        rank.attached_to = engine.geometry.namespace
        return True

    def mapped(self, session: Session, epoch: int) -> None:
        """The process has mapped the arena of its Attached with this epoch; an older one counts for nothing."""
        rank = _rank_of(session)
        if rank is not None and rank.attached_to is not None and epoch >= rank.epoch:
            rank.mapped = True

    def detach(self, session: Session) -> None:
        """The session's rank has unmapped the arena."""
        if _rank_of(session) is not None:
            assert session.rank is not None
            self._withdraw(_engine_of(session), session.rank)

    def leave(self, session: Session) -> None:
        """A session ended, which says nothing about its process."""
        rank = _rank_of(session)
        if rank is not None:
            rank.session = None
        if session.engine is not None:
            session.engine.sessions.remove(session)
            session.engine = None

    def died(self, process: Process) -> None:
        """Proof of death: this process will touch nothing any more."""
        for engine in self:
            for number in [number for number, rank in engine.ranks.items() if rank.process is process]:
                self._withdraw(engine, number)

    def buried(self, engine: Engine) -> None:
        """The caller has freed what it held."""
        assert engine.buriable, "only what nobody can touch is given away"
        engine.may_hold = False

    def drop_empty(self) -> None:
        """Forget engines that are gone."""
        for engine in self:
            if engine.empty:
                del self._engines[engine.key]

    def needs(self, process: Process) -> bool:
        """Its death must be noticed even without a session."""
        return any(rank.process is process for engine in self for rank in engine.ranks.values())

    def check(self) -> None:
        """Every engine is consistent, and no empty one is kept."""
        for engine in self:
            engine.check()
            assert not engine.empty

    def _withdraw(self, engine: Engine, number: int) -> None:
        """Take back what a rank said: it has no copy in flight."""
        if engine.ranks.pop(number, None) is not None:
            engine.geometry = engine.refusal = None

    def _compose_when_complete(self, engine: Engine) -> None:
        if len(engine.ranks) < engine.world:
            return
        declarations = [engine.ranks[number].declaration for number in sorted(engine.ranks)]
        try:
            geometry = self._compose(declarations)
        except Refused as refused:
            engine.refusal = str(refused)
            return
        # A rank that was attached to another layout would read every new plan wrongly.
        for number, rank in engine.ranks.items():
            if rank.attached_to not in (None, geometry.namespace):
                engine.refusal = (
                    f"engine {engine.key} changed its layout while its rank {number} is attached to the old one; "
                    "restart the engine"
                )
                return
        engine.geometry = geometry


def _engine_of(session: Session) -> Engine:
    assert session.engine is not None, "the service lets nobody in before Hello"
    return session.engine


def _rank_of(session: Session) -> Rank | None:
    """The rank that this session stands for: None when it never declared or a later session took over."""
    if session.engine is None or session.rank is None:
        return None
    rank = session.engine.ranks.get(session.rank)
    return rank if rank is not None and rank.session is session else None
