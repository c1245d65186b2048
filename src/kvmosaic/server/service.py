"""The server's table of contents: one method per message. No sockets, threads or files; the loop calls it.

A session speaks only after Hello, and only what its role may say. Expected outcomes are replies; a peer that breaks
the protocol raises RemoteProtocolError, and the loop closes its session with that reason.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Callable
from importlib.metadata import version

from kvmosaic.cache import values
from kvmosaic.cache.cache import Cache
from kvmosaic.cache.values import PackedDigests, pack_objects
from kvmosaic.core.types import BootId, EngineKey, Namespace, ReservationId
from kvmosaic.errors import Refused, RemoteProtocolError
from kvmosaic.layout.groups import Geometry
from kvmosaic.memory.extents import ExtentPool
from kvmosaic.protocol import messages as wire
from kvmosaic.protocol.messages import Reply, Request, Role
from kvmosaic.server.engines import Compose, Engine, Registry, Session
from kvmosaic.server.peers import Process
from kvmosaic.server.report import Report, build_report

Clock = Callable[[], float]

_log = logging.getLogger("kvmosaic.server")

_ROLES: dict[type[wire.Message], tuple[Role, ...]] = {
    wire.Declare: ("worker",),
    wire.Attach: ("worker", "scheduler"),
    wire.Mapped: ("worker",),
    wire.Detach: ("worker",),
    wire.Lookup: ("scheduler",),
    wire.Release: ("scheduler",),
    wire.Reserve: ("scheduler",),
    wire.Commit: ("scheduler",),
    wire.Clear: ("scheduler", "operator"),
    wire.Status: ("worker", "scheduler", "operator"),
}
_ONE_WAY = (wire.Mapped, wire.Detach, wire.Release, wire.Commit)


class Service:
    """Answers the messages of any number of sessions out of one registry and one cache."""

    def __init__(self, cache: Cache, pool: ExtentPool, compose: Compose, boot_id: BootId, clock: Clock) -> None:
        self.boot_id = boot_id
        self.engines = Registry(compose)
        self._cache = cache
        self._pool = pool
        self._clock = clock
        self._started_at = clock()
        self._version = version("kvmosaic")

    def handle(self, session: Session, request: Request) -> Reply | None:
        """The reply to one request, None for one-way messages. An Attached for a worker takes the arena along."""
        if isinstance(request, wire.Hello):
            return self._hello(session, request)
        _check_allowed(session, request)
        reply = self._answer(session, request)
        # No tier or listener wants to know yet; the cache counts for itself.
        self._cache.take_effects()
        return reply

    def lost(self, session: Session) -> None:
        """A session ended. What its engine holds is kept: its processes may still touch it."""
        self.engines.leave(session)
        self._settle()

    def died(self, process: Process) -> None:
        """A process is proven dead."""
        self.engines.died(process)
        self._settle()

    def needs(self, process: Process) -> bool:
        """Its death must be noticed even when it has no session."""
        return self.engines.needs(process)

    def grow(self, to_bytes: int) -> None:
        """The arena is resident up to here."""
        self._pool.grow(to_bytes)

    def report(self) -> Report:
        """Everything an operator may want to know, as one JSON object that nobody changes any more."""
        identity = {
            "boot_id": self.boot_id,
            "version": self._version,
            "pid": os.getpid(),
            "uptime_s": round(self._clock() - self._started_at, 3),
        }
        return {**build_report(self.engines, self._cache, self._pool), **identity}

    def check(self) -> None:
        """Registry and cache are consistent."""
        self.engines.check()
        self._cache.check()

    def _answer(self, session: Session, request: Request) -> Reply | None:
        match request:
            case wire.Clear():
                return self._clear(session, request)
            case wire.Status():
                return wire.StatusReport(request.id, self.report())
        engine = session.engine
        assert engine is not None, "only operators have no engine"
        match request:
            case wire.Lookup():
                return self._lookup(engine, request)
            case wire.Release():
                self._cache.release(engine.key, request.request)
            case wire.Reserve():
                return self._reserve(engine, request)
            case wire.Commit():
                # Also while the engine is attaching again: what every rank has written stays written.
                written, reservation = request.written, ReservationId(request.reservation)
                self._cache.commit(engine.key, reservation, written, self._clock())
            case wire.Attach():
                return self._attach(session, engine, request)
            case wire.Declare():
                return self._declare(session, engine, request)
            case wire.Mapped():
                self.engines.mapped(session, request.epoch)
            case wire.Detach():
                self.engines.detach(session)
                self._settle()
        return None

    # Session.

    def _hello(self, session: Session, hello: wire.Hello) -> Reply:
        if hello.protocol != wire.PROTOCOL:
            raise RemoteProtocolError(
                f"the client speaks protocol {hello.protocol} and this server {wire.PROTOCOL}; "
                "install the same kvmosaic version on both sides"
            )
        if session.role is not None:
            raise RemoteProtocolError("a session says Hello once")
        if hello.role == "operator":
            session.role = "operator"
        elif not hello.engine:
            raise RemoteProtocolError(f"a {hello.role} must name its engine")
        else:
            try:
                self.engines.join(session, hello.role, EngineKey(hello.engine))
            except Refused as refused:
                return wire.Failed(hello.id, str(refused))
        return wire.Welcome(hello.id, self.boot_id)

    def _declare(self, session: Session, engine: Engine, declare: wire.Declare) -> Reply:
        try:
            if session.process.pidfd is None:
                raise Refused(
                    "the kernel gives no pidfd of this process, so its death could not be noticed and its memory "
                    "never be reused; use Linux 6.5 or newer, or one pid namespace for server and engine"
                )
            self.engines.declare(session, declare.declaration)
        except Refused as refused:
            return self._refuse(engine, declare, str(refused))
        self._settle()  # a rank that declares again gives up what it held
        if engine.refusal is not None:
            return self._refuse(engine, declare, engine.refusal)
        if engine.geometry is not None:
            self._enter(engine)
            self._log_geometry(engine.key, engine.geometry)
        return wire.Attaching(declare.id, engine.declared_ranks(), engine.world)

    def _refuse(self, engine: Engine, declare: wire.Declare, reason: str) -> Reply:
        # Its workers ask again and again, since the server may be restarted with other settings.
        if reason != engine.logged_refusal:
            _log.warning("engine %s is refused: %s", engine.key, reason)
            engine.logged_refusal = reason
        return wire.Refusal(declare.id, reason)

    def _log_geometry(self, key: EngineKey, geometry: Geometry) -> None:
        _log.info(
            "engine %s: %s, %d tokens a chunk, %d object group(s), namespace %s",
            key,
            geometry.model,
            geometry.chunk_tokens,
            len(geometry.object_groups),
            geometry.namespace.hex(),
        )
        for warning in geometry.warnings:
            _log.warning("engine %s: %s", key, warning)

    def _attach(self, session: Session, engine: Engine, attach: wire.Attach) -> Reply:
        if engine.refusal is not None:
            return wire.Refusal(attach.id, engine.refusal)
        if session.role == "worker":
            complete = self.engines.attach(session)
            waiting_for = engine.declared_ranks()
        else:
            complete = engine.ready
            waiting_for = engine.mapped_ranks()
            self._move(engine, attach.weights)
        if not complete or engine.geometry is None:
            return wire.Attaching(attach.id, waiting_for, engine.world)
        return wire.Attached(attach.id, self.boot_id, engine.epoch, self._pool.capacity_bytes, engine.geometry)

    # Load.

    def _lookup(self, engine: Engine, lookup: wire.Lookup) -> Reply:
        namespace = _ready_namespace(engine, lookup.epoch)
        if namespace is None:
            return wire.NotReady(lookup.id)
        digests = _digests(lookup.digests, lookup.digest_bytes, lookup.first_chunk)
        answer = self._cache.lookup(engine.key, lookup.request, namespace, lookup.first_chunk, digests, self._clock())
        match answer:
            case values.Hit(boundary, full_chunks, first_chunks, extents, counts):
                return wire.Hit(lookup.id, boundary, full_chunks, first_chunks, extents, counts)
            case values.Miss(full_chunks):
                return wire.Miss(lookup.id, full_chunks)

    # Store.

    def _reserve(self, engine: Engine, reserve: wire.Reserve) -> Reply:
        namespace = _ready_namespace(engine, reserve.epoch)
        if namespace is None:
            return wire.NotReady(reserve.id)
        chains = [_chain(chain) for chain in reserve.chains]
        reservation = self._cache.reserve(engine.key, namespace, chains, self._clock())
        extents, counts = pack_objects(reservation.objects)
        return wire.Reserved(reserve.id, reservation.id, reservation.outcomes, extents, counts)

    # Operators, and engines whose weights changed.

    def _clear(self, session: Session, clear: wire.Clear) -> Reply:
        if session.engine is not None:
            if not clear.weights:
                raise RemoteProtocolError("an engine's Clear must name its weights from now on")
            if session.engine.geometry is None:
                return wire.NotReady(clear.id)
            return wire.Cleared(clear.id, self._move(session.engine, clear.weights))
        if not clear.model:
            return wire.Cleared(clear.id, self._cache.clear(None))
        known = self._cache.stats().namespaces
        chosen = [one.namespace for one in known if one.geometry.model == clear.model]
        if not chosen:
            models = ", ".join(sorted({one.geometry.model for one in known})) or "none"
            return wire.Failed(clear.id, f"model {clear.model!r} is not here; known models: {models}")
        return wire.Cleared(clear.id, sum(self._cache.clear(namespace) for namespace in chosen))

    def _move(self, engine: Engine, weights: str) -> int:
        """Let an engine store and find under these weights; how many objects were forgotten, since nobody is left
        who computes with the old ones."""
        left, engine.weights = engine.namespace, weights
        self._enter(engine)
        if left is None or any(other.namespace == left for other in self.engines):
            return 0
        forgotten = self._cache.clear(left)
        self._drop_unused()
        return forgotten

    def _enter(self, engine: Engine) -> None:
        if engine.namespace is not None and engine.geometry is not None:
            self._cache.open(engine.namespace, engine.geometry)

    def _drop_unused(self) -> None:
        self._cache.drop_empty({engine.namespace for engine in self.engines})

    def _settle(self) -> None:
        """Bury what nobody can touch any more."""
        for engine in self.engines:
            if engine.buriable:
                _log.info("engine %s is gone: what it held is free", engine.key)
                self._cache.bury(engine.key)
                self.engines.buried(engine)
        self.engines.drop_empty()
        self._drop_unused()


def _check_allowed(session: Session, request: Request) -> None:
    name = type(request).__name__
    if session.role is None:
        raise RemoteProtocolError(f"{name} came before Hello")
    if session.role not in _ROLES[type(request)]:
        raise RemoteProtocolError(f"a {session.role} may not send {name}")
    if request.id and isinstance(request, _ONE_WAY):
        raise RemoteProtocolError(f"{name} is one-way and must have id 0, not {request.id}")


def _ready_namespace(engine: Engine, epoch: int) -> Namespace | None:
    return engine.namespace if engine.ready and epoch == engine.epoch else None


def _digests(packed: bytes, digest_bytes: int, first_chunk: int) -> PackedDigests:
    if first_chunk < 0:
        raise RemoteProtocolError(f"chunk {first_chunk} does not exist")
    return PackedDigests(packed, digest_bytes)


def _chain(chain: wire.Chain) -> values.Chain:
    digests = _digests(chain.digests, chain.digest_bytes, chain.first_chunk)[:]
    if len(chain.wanted) != 4 * len(digests):
        raise RemoteProtocolError(f"{len(chain.wanted)} bytes of wanted objects for {len(digests)} chunks")
    if (chain.first_chunk == 0) != (chain.parent == b""):
        raise RemoteProtocolError("exactly the chunks after the first have a parent")
    return values.Chain(chain.first_chunk, chain.parent, digests, array("I", chain.wanted))
