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
    lookahead_chunks: int

    @classmethod
    def of(cls, namespace: Namespace, geometry: Geometry) -> Shape:
        groups = list(enumerate(geometry.object_groups))
        return cls(
            namespace=namespace,
            object_bytes=tuple(group.object_bytes for _, group in groups),
            full_mask=sum(1 << g for g, group in groups if group.kind is Kind.FULL),
            state_mask=sum(1 << g for g, group in groups if group.kind is Kind.STATE),
            windows=tuple((g, group.reach_chunks or 1) for g, group in groups if group.kind is Kind.WINDOW),
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

    def needs_window(self, reach_chunks: int) -> bool:
        """Tell whether a boundary within the reach of a window object here may be asked for: after a chunk that ends
        a prompt, where prompts part, where there is a state, or where a lease ends."""
        entry = self
        for _ in range(reach_chunks):
            child = entry.child
            if child is None or not child.present or child.next_sibling is not None:
                return True
            if entry.leases or entry.present & entry.shape.state_mask:
                return True
            entry = child
        return False

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
