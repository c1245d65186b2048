"""One chunk of one namespace: which of its objects there are, where, and who needs them.

The entries of a namespace form a tree by parent, since a chunk's digest contains the prefix before it. Each object of
an entry is in one of three states:

    absent  --reserve-->  writing  --commit-->  present  --evict or clear-->  absent
                          writing  --abort--->  absent

An entry lives while it has an object, a write or a child. No I/O; only the cache changes entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvmosaic.core.types import Digest, Extents, Kind, Namespace
from kvmosaic.layout.groups import Geometry

NOTHING = Extents(b"")


@dataclass(frozen=True, slots=True)
class Shape:
    """What all entries of a namespace have in common; masks have bit g for object group g."""

    namespace: Namespace
    object_bytes: tuple[int, ...]
    full_mask: int
    state_mask: int
    windows: tuple[tuple[int, int], ...]
    """(object group, reach in chunks) of each window group."""
    longest_window_chunks: int
    lookahead_chunks: int

    @classmethod
    def of(cls, namespace: Namespace, geometry: Geometry) -> Shape:
        groups = list(enumerate(geometry.object_groups))
        windows = tuple((g, group.reach_chunks or 1) for g, group in groups if group.kind is Kind.WINDOW)
        return cls(
            namespace=namespace,
            object_bytes=tuple(group.object_bytes for _, group in groups),
            full_mask=sum(1 << g for g, group in groups if group.kind is Kind.FULL),
            state_mask=sum(1 << g for g, group in groups if group.kind is Kind.STATE),
            windows=windows,
            longest_window_chunks=max((reach for _, reach in windows), default=0),
            lookahead_chunks=max(group.lookahead_chunks for _, group in groups),
        )


class Entry:
    """A node of the tree. Compared and hashed by identity."""

    __slots__ = (
        "child",
        "chunk",
        "digest",
        "extents",
        "gone",
        "leases",
        "next_sibling",
        "num_bytes",
        "parent",
        "pins",
        "present",
        "previous_sibling",
        "queued",
        "shape",
        "stamp",
        "writing",
    )

    def __init__(self, shape: Shape, digest: Digest, parent: Entry | None, now: float) -> None:
        self.shape = shape
        self.digest = digest
        self.chunk: int = 0 if parent is None else parent.chunk + 1
        self.present = 0
        self.writing = 0
        self.extents = [NOTHING] * len(shape.object_bytes)
        self.num_bytes = 0  # of the present objects
        self.leases = 0  # how many leases end at this entry
        self.pins = 0  # those, and one for each child with pins: a lease pins the path to its end
        self.stamp = now  # the eviction policy's; the lowest goes first
        self.queued = False  # among the evictor's leaves
        self.gone = False  # no longer in the index
        self.parent = parent
        self.child: Entry | None = None
        self.next_sibling: Entry | None = None
        self.previous_sibling: Entry | None = None
        if parent is not None:
            self._link(parent)

    @property
    def is_empty(self) -> bool:
        """Nothing keeps this entry alive."""
        return not (self.present or self.writing or self.child)

    @property
    def is_evictable(self) -> bool:
        """A leaf that nobody reads or writes."""
        return not (self.child or self.leases or self.writing or self.gone) and self.present != 0

    @property
    def is_servable(self) -> bool:
        """Everything a boundary right after this chunk needs is present, as far as this needs no walk to the root."""
        kept = self.shape.full_mask | self.shape.state_mask
        if self.present & kept != kept:
            return False
        return all(all(entry.present >> g & 1 for entry in self.path(reach)) for g, reach in self.shape.windows)

    def path(self, max_chunks: int) -> Iterator[Entry]:
        """Yield this entry and its ancestors, at most `max_chunks` of them."""
        entry: Entry | None = self
        while entry is not None and max_chunks > 0:
            yield entry
            entry = entry.parent
            max_chunks -= 1

    @property
    def may_end_a_hit(self) -> bool:
        """Whether the boundary after this chunk is likely to be asked for: a prompt ends here, prompts part here, a
        state is here, or a lease ends here. Window objects elsewhere are of no use."""
        child = self.child
        if child is None or not child.present or child.next_sibling is not None:
            return True
        return self.leases > 0 or self.present & self.shape.state_mask != 0

    def chunks_to_end(self, max_chunks: int) -> int:
        """How many chunks further down the nearest one is that may end a hit, at most `max_chunks`."""
        entry, chunks = self, 0
        while chunks < max_chunks and not entry.may_end_a_hit:
            assert entry.child is not None
            entry = entry.child
            chunks += 1
        return chunks

    def objects(self) -> Iterator[tuple[int, Extents]]:
        """Yield the object group and the extents of each present object."""
        return ((g, extents) for g, extents in enumerate(self.extents) if extents)

    def children(self) -> Iterator[Entry]:
        child = self.child
        while child is not None:
            yield child
            child = child.next_sibling

    def _link(self, parent: Entry) -> None:
        self.next_sibling = parent.child
        if parent.child is not None:
            parent.child.previous_sibling = self
        parent.child = self

    def unlink(self) -> None:
        """Take this entry out of its parent's children."""
        if self.previous_sibling is not None:
            self.previous_sibling.next_sibling = self.next_sibling
        elif self.parent is not None:
            self.parent.child = self.next_sibling
        if self.next_sibling is not None:
            self.next_sibling.previous_sibling = self.previous_sibling
        self.next_sibling = self.previous_sibling = None
