"""Which objects go when there is no room. Chooses, never frees.

First go window objects outside every reach: no boundary that is likely to be asked for needs them. Then leaves, in
the order of a policy. The policy sees only the last chunk of each chain that was used; a parent takes over the
stamp of the leaf that went, which is the same as stamping the whole chain at each use.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

from kvmosaic.cache.entry import Entry


class Policy(Protocol):
    """Gives an entry its stamp; the leaf with the lowest one goes first."""

    def stamp(self, entry: Entry, now: float) -> float:
        """Return the stamp of an entry that is used; never lower than the one it has."""


class LRU:
    """The least recently used chain goes first."""

    def stamp(self, entry: Entry, now: float) -> float:
        return now


POLICIES: dict[str, type[Policy]] = {"LRU": LRU}


class Evictor:
    """The entries and objects that may go, kept up to date by the cache's calls."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._order = 0
        # Every evictable leaf is in the heap, once; others in it are skipped when they surface. An entry used since
        # it was queued goes back with its new stamp.
        self._leaves: list[tuple[float, int, Entry]] = []
        # (entry, object group) to reach: every window object outside every reach, and some that are not; oldest first.
        self._windows: OrderedDict[tuple[Entry, int], int] = OrderedDict()  # a dict's front is slow to empty

    def use(self, entry: Entry, now: float) -> None:
        """The chain up to this entry was used."""
        entry.stamp = self._policy.stamp(entry, now)

    def offer(self, entry: Entry) -> None:
        """This entry may have become an evictable leaf."""
        if entry.is_evictable and not entry.queued:
            entry.queued = True
            self._push(entry)

    def nominate(self, entry: Entry, max_chunks: int) -> None:
        """Window objects of this entry and its ancestors may have come to lie outside every reach."""
        for ancestor in entry.path(max_chunks):
            for g, reach in ancestor.shape.windows:
                if ancestor.present >> g & 1:
                    self._windows.setdefault((ancestor, g), reach)

    def next_window(self) -> tuple[Entry, int] | None:
        """Return a window object that may go."""
        while self._windows:
            (entry, g), reach = self._windows.popitem(last=False)
            if entry.present >> g & 1 and entry.chunks_to_end(reach) >= reach:
                return entry, g
        return None

    def next_leaf(self) -> Entry | None:
        """Return the evictable leaf with the lowest stamp, taken out of the queue."""
        while self._leaves:
            stamp, _, entry = heapq.heappop(self._leaves)
            if entry.is_evictable and entry.stamp != stamp:
                self._push(entry)
                continue
            entry.queued = False
            if entry.is_evictable:
                return entry
        return None

    def sweep(self) -> None:
        """Drop entries that have gone, after many of them went at once."""
        self._leaves = [item for item in self._leaves if not item[2].gone]
        heapq.heapify(self._leaves)
        self._windows = OrderedDict(item for item in self._windows.items() if not item[0][0].gone)

    def check(self, entries: Iterable[Entry]) -> None:
        """Assert that everything that may go can be found."""
        queued = {entry for _, _, entry in self._leaves}
        assert len(queued) == len(self._leaves), "an entry is queued twice"
        for entry in entries:
            assert (entry in queued) == entry.queued
            assert entry.queued or not entry.is_evictable, "an evictable leaf would never go"
            for g, reach in entry.shape.windows:
                outside = entry.present >> g & 1 and entry.chunks_to_end(reach) >= reach
                assert not outside or (entry, g) in self._windows, "a window object outside every reach would stay"

    def _push(self, entry: Entry) -> None:
        self._order += 1
        heapq.heappush(self._leaves, (entry.stamp, self._order, entry))
