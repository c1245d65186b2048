"""The cache beside the model under random verbs, both checked after each step."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvmosaic.cache.cache import Cache
from kvmosaic.cache.values import Chain
from kvmosaic.core.effects import Evicted, Stored
from kvmosaic.core.types import EngineKey, Kind, Namespace, ReservationId, pack_extents
from kvmosaic.layout.groups import Geometry
from kvmosaic.memory.extents import ExtentPool
from tests.cache.builders import FULL, QUANTUM, STATE, digests, geometry_of, object_group, window
from tests.cache.model import Model, Writer

GEOMETRIES = {
    Namespace(b"full"): geometry_of(FULL),
    Namespace(b"hybrid"): geometry_of(object_group(Kind.FULL, None, 20_000), window(2), STATE),
    Namespace(b"windows"): geometry_of(object_group(Kind.FULL, None, 5_000, lookahead=1), window(1), window(3)),
    Namespace(b"states"): geometry_of(object_group(Kind.STATE, 1, 3 * QUANTUM + 1)),
}

SPACES = st.sampled_from([0, 0, 0, 1])
ENGINES = st.sampled_from([EngineKey("engine"), EngineKey("other"), EngineKey("third")])
REQUESTS = st.sampled_from(["first", "second", "third"])
TAILS = st.one_of(st.just(""), st.text("ab", max_size=4))


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.model = Model(GEOMETRIES)

    @initialize(quanta=st.integers(8, 60), order=st.permutations(list(GEOMETRIES)))
    def start(self, quanta: int, order: list[Namespace]) -> None:
        self.spaces = order[:2]
        self.pool = ExtentPool(quanta * QUANTUM, QUANTUM)
        self.pool.grow(quanta * QUANTUM * 2 // 3)
        self.cache = Cache(self.pool)
        for namespace, geometry in GEOMETRIES.items():
            self.cache.open(namespace, geometry)

    @rule(engine=ENGINES, space=SPACES, data=st.data(), num_chains=st.integers(1, 2))
    def reserve(self, engine: EngineKey, space: int, data: st.DataObject, num_chains: int) -> None:
        namespace = self.spaces[space]
        prompts = [self.prompt(data, namespace) for _ in range(num_chains)]
        chains = [data.draw(chains_of(prompt, GEOMETRIES[namespace])) for prompt in prompts]
        answer = self.cache.reserve(engine, namespace, chains, self.tick())
        self.model.reserved(engine, namespace, chains, answer, self.cache.take_effects())

    @rule(engine=ENGINES, space=SPACES, data=st.data())
    def store(self, engine: EngineKey, space: int, data: st.DataObject) -> None:
        namespace = self.spaces[space]
        prompt = self.prompt(data, namespace)
        everything = (1 << len(GEOMETRIES[namespace].object_groups)) - 1
        chain = Chain(0, b"", digests(prompt), [everything] * len(prompt))
        answer = self.cache.reserve(engine, namespace, [chain], self.tick())
        self.model.reserved(engine, namespace, [chain], answer, self.cache.take_effects())
        self.end(engine, answer.id, b"\1" * len(answer.objects))

    @precondition(lambda self: self.model.writers)
    @rule(data=st.data(), number=st.sampled_from([0, 0, 0, 99]), engine=st.sampled_from(["", "", "", "other"]))
    def commit(self, data: st.DataObject, number: int, engine: str) -> None:
        """Now and then with an id that is not a reservation's, or by an engine that is not the owner."""
        number = number or data.draw(st.sampled_from(sorted(self.model.writers)))
        writer = self.model.writers.get(number, Writer("engine", []))
        size = len(writer.objects)
        written = bytes(data.draw(st.lists(st.sampled_from([1, 1, 1, 0]), min_size=size, max_size=size)))
        self.end(EngineKey(engine or writer.engine), number, written)

    @rule(engine=ENGINES, request=REQUESTS, space=SPACES, data=st.data())
    def lookup(self, engine: EngineKey, request: str, space: int, data: st.DataObject) -> None:
        namespace = self.spaces[space]
        prompt = self.prompt(data, namespace)
        first = min(data.draw(st.sampled_from([0, 0, 0, 1, 2])), len(prompt) - 1)
        asked = digests(prompt)[first:]
        capped = self.cache.stats().counters.capped_leases
        answer = self.cache.lookup(engine, request, namespace, first, asked, self.tick())
        was_capped = self.cache.stats().counters.capped_leases > capped
        lease = self.model.looked_up(namespace, first, asked, answer, was_capped)
        self.model.leases.pop((engine, request), None)
        if lease:
            self.model.leases[engine, request] = lease
        assert self.cache.take_effects() == []

    @rule(engine=ENGINES, request=REQUESTS)
    def release(self, engine: EngineKey, request: str) -> None:
        self.cache.release(engine, request)
        self.model.leases.pop((engine, request), None)

    @rule(engine=ENGINES, space=SPACES, what=st.integers(0, 11))
    def bury_or_clear(self, engine: EngineKey, space: int, what: int) -> None:
        if what == 0:
            self.bury(engine)
        elif what == 1:
            self.clear(self.spaces[space])
        elif what == 2:
            self.clear(None)

    def bury(self, engine: EngineKey) -> None:
        self.cache.bury(engine)
        self.model.writers = {n: writer for n, writer in self.model.writers.items() if writer.engine != engine}
        self.model.leases = {key: lease for key, lease in self.model.leases.items() if key[0] != engine}

    def clear(self, namespace: Namespace | None) -> None:
        self.model.cleared([namespace] if namespace else list(GEOMETRIES), self.cache.clear(namespace))
        assert all(isinstance(effect, Evicted) for effect in self.cache.take_effects())

    @rule(quanta=st.integers(1, 60))
    def grow(self, quanta: int) -> None:
        self.pool.grow(quanta * QUANTUM)

    @invariant()
    def is_sound(self) -> None:
        self.cache.check()
        self.model.check()
        stats = self.cache.stats()
        assert stats.leases == len(self.model.leases)
        assert stats.reservations == len(self.model.writers)
        assert stats.objects == len(self.model.present)
        leased = {extents: key for lease in self.model.leases.values() for key, extents in lease}
        assert sum(self.num_bytes(key) for key in leased.values()) <= stats.leased_bytes
        assert stats.leased_bytes <= self.pool.capacity_bytes * 3 / 4

    def teardown(self) -> None:
        for engine in ("engine", "other", "third"):
            self.bury(EngineKey(engine))
        self.clear(None)
        self.is_sound()
        assert self.pool.used_bytes == 0

    def end(self, engine: EngineKey, number: int, written: bytes) -> None:
        visible = self.cache.commit(engine, ReservationId(number), written, self.tick())
        self.model.committed(engine, number, written, visible)
        effects = self.cache.take_effects()
        assert len(effects) == visible
        assert all(isinstance(effect, Stored) for effect in effects)

    def prompt(self, data: st.DataObject, namespace: Namespace) -> str:
        """A known prompt or a new one, with a tail: chains that meet, part and hold each other."""
        known = sorted({digest.decode() for space, digest, _ in self.model.present if space == namespace})
        return data.draw(st.sampled_from([*known, ""])) + data.draw(TAILS) or "a"

    def num_bytes(self, key: tuple[Namespace, bytes, int]) -> int:
        return GEOMETRIES[key[0]].object_groups[key[2]].object_bytes

    def tick(self) -> float:
        self.now += 1
        return self.now


@st.composite
def chains_of(draw: Any, prompt: str, geometry: Geometry) -> Chain:
    first = draw(st.integers(0, len(prompt) - 1))
    every = digests(prompt)
    everything = (1 << len(geometry.object_groups)) - 1
    masks = st.one_of(st.just(everything), st.just(1), st.integers(0, everything))
    wanted = draw(st.lists(masks, min_size=len(prompt) - first, max_size=len(prompt) - first))
    return Chain(first, every[first - 1] if first else b"", every[first:], wanted)


TestCacheMachine = pytest.mark.slow(CacheMachine.TestCase)
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_model_notices_bytes_given_away_too_early() -> None:
    model = Model(GEOMETRIES)
    key = (Namespace(b"full"), b"a", 0)
    extents = pack_extents([(0, QUANTUM)])
    model.writers[1] = Writer("engine", [(key, extents)])
    model.write(extents, (1, key))
    model.committed("engine", 1, b"\1", 1)
    model.check()
    model.write(pack_extents([(QUANTUM - 4096, 4096)]), "another")
    with pytest.raises(AssertionError, match="wrong bytes"):
        model.check()


def test_the_model_notices_a_head_that_goes_before_its_tail() -> None:
    model = Model(GEOMETRIES)
    model.present = {(Namespace(b"full"), digest, 0): b"" for digest in digests("ab")}
    with pytest.raises(AssertionError, match="head"):
        model.evicted([Evicted(Namespace(b"full"), digests("a")[0], 0, QUANTUM)])  # type: ignore[arg-type]  # bytes
