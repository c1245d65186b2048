"""The registry beside a model of who may still touch the arena."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvmosaic.core.types import EngineKey
from kvmosaic.errors import Refused
from kvmosaic.layout.objects import compose
from kvmosaic.server.engines import Registry, Session
from tests.server.kit import MortalProcess, declaration

WORLD = 2
engines = st.sampled_from([EngineKey("a"), EngineKey("b")])
ranks = st.integers(0, WORLD - 1)


class Registrations(RuleBasedStateMachine):
    """`may_touch` holds (engine, rank, process) from the moment a process is given the arena until it is dead, has
    detached or has declared the rank again; `asked` holds engines whose scheduler may have got something."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = Registry(lambda declarations: compose(declarations, None, True))
        self.processes = [MortalProcess() for _ in range(3)]
        self.dead: set[MortalProcess] = set()
        self.may_touch: set[tuple[EngineKey, int, MortalProcess]] = set()
        self.asked: set[EngineKey] = set()
        self.schedulers: set[tuple[EngineKey, Session]] = set()

    sessions = Bundle("sessions")

    def alive(self, number: int) -> MortalProcess:
        if self.processes[number] in self.dead:
            self.processes[number] = MortalProcess()
        return self.processes[number]

    @rule(target=sessions, engine=engines, number=st.integers(0, 2), is_worker=st.booleans())
    def join(self, engine: EngineKey, number: int, is_worker: bool) -> Session:
        session = Session(self.alive(number))
        try:
            self.registry.join(session, "worker" if is_worker else "scheduler", engine)
        except Refused:
            assert any(key == engine and other.process is not session.process for key, other in self.schedulers)
            return session
        if not is_worker:
            self.asked.add(engine)
            self.schedulers.add((engine, session))
        return session

    @rule(session=sessions, rank=ranks, block_tokens=st.sampled_from([16, 16, 32]))
    def declare(self, session: Session, rank: int, block_tokens: int) -> None:
        if session.role != "worker" or session.engine is None:
            return
        process = session.process
        assert isinstance(process, MortalProcess)
        key = session.engine.key
        try:
            self.registry.declare(session, declaration(rank, WORLD, block_tokens=block_tokens))
        except Refused:
            return
        self.may_touch.discard((key, rank, process))
        assert not any(k == key and r == rank for k, r, _ in self.may_touch), "no rank is taken from a live process"

    @rule(session=sessions)
    def attach_and_map(self, session: Session) -> None:
        if session.role != "worker" or session.engine is None or not self.registry.attach(session):
            return
        assert session.rank is not None
        assert isinstance(session.process, MortalProcess)
        self.may_touch.add((session.engine.key, session.rank, session.process))
        self.registry.mapped(session, session.engine.epoch)

    @rule(session=sessions)
    def detach(self, session: Session) -> None:
        if session.role != "worker" or session.engine is None or session.rank is None:
            return
        rank = session.engine.ranks.get(session.rank)
        if rank is not None and rank.session is session:
            assert isinstance(session.process, MortalProcess)
            self.may_touch.discard((session.engine.key, session.rank, session.process))
        self.registry.detach(session)

    @rule(session=consumes(sessions))
    def leave(self, session: Session) -> None:
        self.schedulers = {(key, other) for key, other in self.schedulers if other is not session}
        self.registry.leave(session)

    @rule(number=st.integers(0, 2), noticed=st.booleans())
    def die(self, number: int, noticed: bool) -> None:
        process = self.alive(number)
        process.die()
        self.dead.add(process)
        self.may_touch = {held for held in self.may_touch if held[2] is not process}
        if noticed:
            self.registry.died(process)

    @invariant()
    def only_what_nobody_can_touch_is_buried(self) -> None:
        for engine in self.registry:
            if engine.buriable:
                assert not any(key == engine.key for key, _, _ in self.may_touch)
                assert not any(key == engine.key for key, _ in self.schedulers)
                self.registry.buried(engine)
                self.asked.discard(engine.key)
        self.registry.drop_empty()
        self.registry.check()

    @invariant()
    def nothing_is_forgotten(self) -> None:
        here = {engine.key: engine for engine in self.registry}
        for key in self.asked:
            assert here[key].may_hold, "held until it is buried"
        for key, rank, process in self.may_touch:
            assert here[key].ranks[rank].process is process
            assert self.registry.needs(process)


Registrations.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_registrations = Registrations.TestCase
