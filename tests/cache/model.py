"""What must hold whichever objects the cache chooses to evict, in plain dicts that never look into the cache.

The model keeps the arena's bytes: a writer's and a reader's objects carry a tag in every grain, so that an extent given
away too early or twice is seen as a wrong byte.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvmosaic.cache.values import Chain, Hit, Miss, Reservation
from kvmosaic.core.effects import Effect, Evicted
from kvmosaic.core.types import Namespace, Outcome, unpack_extents
from kvmosaic.layout.groups import Geometry
from kvmosaic.memory.extents import GRAIN_BYTES
from tests.layout.test_fold import oracle

Key = tuple[Namespace, bytes, int]


@dataclass
class Writer:
    """A reservation's objects and where they lie; `late` once a clear has ended it."""

    engine: str
    objects: list[tuple[Key, bytes]]
    late: bool = False


@dataclass
class Model:
    geometries: dict[Namespace, Geometry]
    arena: dict[int, object] = field(default_factory=dict)
    present: dict[Key, bytes] = field(default_factory=dict)
    writers: dict[int, Writer] = field(default_factory=dict)
    leases: dict[tuple[str, str], list[tuple[Key, bytes]]] = field(default_factory=dict)

    def reserved(
        self, engine: str, namespace: Namespace, chains: Sequence[Chain], answer: Reservation, effects: list[Effect]
    ) -> None:
        writing = {key for writer in self.writers.values() if not writer.late for key, _ in writer.objects}
        here_before = writing | set(self.present)
        self.evicted(effects)
        asked = [
            (namespace, digest, g)
            for chain in chains
            for digest, wanted in zip(chain.digests, chain.wanted, strict=True)
            for g in range(32)
            if wanted >> g & 1
        ]
        granted = []
        for key, outcome in zip(asked, answer.outcomes, strict=True):
            if outcome == Outcome.GRANTED:
                assert key not in writing
                assert key not in self.present
                granted.append(key)
            assert outcome != Outcome.PRESENT or key in here_before or key in granted
        assert bool(granted) == bool(answer.id)
        if granted:
            self.writers[answer.id] = Writer(engine, list(zip(granted, answer.objects, strict=True)))
        for key, extents in zip(granted, answer.objects, strict=True):
            self.write(extents, (answer.id, key))

    def committed(self, engine: str, number: int, written: bytes, visible: int) -> None:
        writer = self.writers.get(number)
        if writer is None or writer.engine != engine:
            assert visible == 0
            return
        del self.writers[number]
        for (key, extents), done in zip(writer.objects, written, strict=True):
            self.read(extents, (number, key))
            self.write(extents, key if done else None)
            if done and not writer.late:
                self.present[key] = extents
        assert visible == (0 if writer.late else sum(written))

    def looked_up(
        self, namespace: Namespace, first: int, digests: list[bytes], answer: Hit | Miss, capped: bool
    ) -> list[tuple[Key, bytes]]:
        """Check the answer and return the objects that it leases."""
        groups = self.geometries[namespace].object_groups
        here = [sum(((namespace, digest, g) in self.present) << g for g in range(len(groups))) for digest in digests]
        limit = first + len(digests) - max(group.lookahead_chunks for group in groups)
        boundary, depth = oracle(here, first, groups, limit)
        found = answer.boundary if isinstance(answer, Hit) else first
        assert found == boundary or (capped and found < boundary)
        assert found == oracle(here, first, groups, found)[0], "a boundary that cannot be served"
        assert answer.full_chunks == depth
        lease: list[tuple[Key, bytes]] = []
        if isinstance(answer, Hit):
            for g, group in enumerate(groups):
                start = first if group.reach_chunks is None else max(first, found - group.reach_chunks)
                keys = [(namespace, digest, g) for digest in digests[start - first : found - first]]
                objects = [self.present[key] for key in keys]
                assert answer.first_chunks[g] == start
                assert answer.extents[g] == b"".join(objects)
                assert answer.extent_counts[g] == b"".join((len(o) // 16).to_bytes(4, "little") for o in objects)
                lease += zip(keys, objects, strict=True)
        return lease

    def cleared(self, namespaces: Iterable[Namespace], forgotten: int) -> None:
        gone = [key for key in self.present if key[0] in namespaces]
        assert forgotten == len(gone)
        for key in gone:
            del self.present[key]
        for writer in self.writers.values():
            writer.late = writer.late or writer.objects[0][0][0] in namespaces

    def evicted(self, effects: list[Effect]) -> None:
        """Check that the cache may evict what it says it did, and forget it."""
        leased = {extents for lease in self.leases.values() for _, extents in lease}
        for effect in effects:
            assert isinstance(effect, Evicted)
            key = (effect.namespace, effect.digest, effect.object_group)
            group = self.geometries[key[0]].object_groups[key[2]]
            assert effect.num_bytes == group.object_bytes
            if group.reach_chunks is None:
                followers = [k for k in self.present if k[0] == key[0] and k[1] != key[1] and k[1].startswith(key[1])]
                assert not followers, "the head of a chain went before its tail"
            assert self.present.pop(key) not in leased, "a leased object went"

    def check(self) -> None:
        """Every reader and every writer finds its own bytes."""
        for key, extents in self.present.items():
            self.read(extents, key)
        for lease in self.leases.values():
            for key, extents in lease:
                self.read(extents, key)
        for number, writer in self.writers.items():
            for key, extents in writer.objects:
                self.read(extents, (number, key))

    def write(self, extents: bytes, tag: object) -> None:
        self.arena.update((grain, tag) for grain in _grains(extents))

    def read(self, extents: bytes, tag: object) -> None:
        assert all(self.arena[grain] == tag for grain in _grains(extents)), "wrong bytes"


def _grains(extents: bytes) -> Iterable[int]:
    for offset, length in unpack_extents(extents):
        yield from range(offset, offset + length, GRAIN_BYTES)
