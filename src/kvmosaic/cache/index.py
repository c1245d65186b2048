"""The entries of one namespace, by digest. Finds the known part of a prompt; never evicts and never allocates.

Its tree is closed towards the root: an entry's parent is in the index as long as the entry is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from kvmosaic.cache.entry import NOTHING, Entry, Shape
from kvmosaic.core.types import Digest, Extents, Namespace
from kvmosaic.layout.groups import Geometry


class Index:
    """One namespace at its present generation, with the numbers that status shows."""

    def __init__(self, namespace: Namespace, geometry: Geometry) -> None:
        self.namespace = namespace
        self.geometry = geometry
        self.shape = Shape.of(namespace, geometry)
        self.generation = 0
        self.objects = [0] * len(geometry.object_groups)
        self.lookups = 0
        self.hits = 0
        self.hit_chunks = 0
        self._entries: dict[bytes, Entry] = {}

    def find(self, digests: Sequence[bytes], first_chunk: int) -> list[Entry]:
        """Return the entries of the leading digests that are known; the first one is that of `first_chunk`.

        If a chunk is known, so are all before it: the last one is found by bisection, the others from child to
        parent, so that neither each digest is looked at nor a list that is no chain can lead anywhere.
        """
        entries = self._entries
        known = bisect_left(range(len(digests)), True, key=lambda i: digests[i] not in entries)
        path: list[Entry] = []
        entry = entries[digests[known - 1]] if known else None
        if entry is None or entry.chunk != first_chunk + known - 1:
            return path
        for _ in range(known):
            assert entry is not None
            path.append(entry)
            entry = entry.parent
        path.reverse()
        return path

    def get(self, digest: bytes) -> Entry | None:
        return self._entries.get(digest)

    def grow(self, digest: bytes, parent: Entry | None, now: float) -> Entry | None:
        """Return the entry of a chunk after `parent`, made if need be; None when the digest belongs elsewhere."""
        entry = self._entries.get(digest)
        if entry is None:
            entry = self._entries[digest] = Entry(self.shape, Digest(digest), parent, now)
        return entry if entry.parent is parent else None

    def remove(self, entry: Entry) -> None:
        """Forget an entry without objects, writes and children."""
        assert entry.is_empty, "an entry in use cannot be removed"
        del self._entries[entry.digest]
        entry.unlink()
        entry.gone = True

    def put(self, entry: Entry, g: int, extents: Extents) -> None:
        """Make an object present."""
        assert not entry.present >> g & 1, "an object cannot be present twice"
        entry.present |= 1 << g
        entry.extents[g] = extents
        entry.num_bytes += self.shape.object_bytes[g]
        self.objects[g] += 1

    def take(self, entry: Entry, g: int) -> Extents:
        """Make a present object absent and return where it lies."""
        extents = entry.extents[g]
        entry.present &= ~(1 << g)
        entry.extents[g] = NOTHING
        entry.num_bytes -= self.shape.object_bytes[g]
        self.objects[g] -= 1
        return extents

    def clear(self) -> list[Entry]:
        """Start a new generation and return the entries of the old one, in no order and without links downwards."""
        old = list(self._entries.values())
        self._entries = {}
        self.objects = [0] * len(self.objects)
        self.generation += 1
        for entry in old:
            entry.gone = True
            entry.child = entry.next_sibling = entry.previous_sibling = None
        return old

    def __iter__(self) -> Iterator[Entry]:
        yield from self._entries.values()

    def __len__(self) -> int:
        return len(self._entries)

    def check(self) -> None:
        """Assert that the tree is sound and the numbers are those of the entries."""
        objects = [0] * len(self.objects)
        for digest, entry in self._entries.items():
            assert entry.digest == digest
            assert not entry.gone
            assert not entry.is_empty, "an entry that nothing keeps alive"
            assert not entry.present & entry.writing, "an object is both present and being written"
            parent = entry.parent
            assert entry.chunk == (0 if parent is None else parent.chunk + 1)
            assert parent is None or (self._entries.get(parent.digest) is parent and entry in parent.children())
            for g, extents in enumerate(entry.extents):
                assert bool(extents) == bool(entry.present >> g & 1), "presence and extents differ"
                objects[g] += bool(extents)
            sizes = zip(entry.extents, self.shape.object_bytes, strict=True)
            assert entry.num_bytes == sum(size for extents, size in sizes if extents)
        assert objects == self.objects, "object counts are wrong"
