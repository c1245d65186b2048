"""Who reads and who writes: leases by (engine, request), reservations by id. Bookkeeping only, frees nothing.

A lease pins the path from the root to its last chunk. An entry is pinned once, however many leases need it, and its
bytes are charged to the lease that pinned it: one engine may pin at most half of what the arena has and all of them
together three quarters, so that a stopped engine cannot hold it all.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvmosaic.cache.entry import Entry
from kvmosaic.core.types import EngineKey, Extents, Namespace, ReservationId


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to read what the boundary after `tail` needs."""

    tail: Entry
    charged_bytes: int


@dataclass(frozen=True, slots=True)
class Held:
    """A reservation: (entry, object group, extents) of each granted object."""

    engine: EngineKey
    namespace: Namespace
    generation: int
    objects: list[tuple[Entry, int, Extents]]


class Leases:
    """Leases and the bytes they pin."""

    def __init__(self) -> None:
        self.pinned_bytes = 0
        self._leases: dict[tuple[EngineKey, str], Lease] = {}
        self._charged: Counter[EngineKey] = Counter()

    def take(self, engine: EngineKey, request: str, tail: Entry, arena_bytes: int) -> int:
        """Lease the path to `tail` for a request that has no lease; return the boundary after it.

        A smaller boundary means that nothing was leased, and that the caps allow no path longer than that.
        """
        assert (engine, request) not in self._leases, "one lease per request"
        charged = _pin(tail)
        room = min(arena_bytes // 2 - self._charged[engine], arena_bytes * 3 // 4 - self.pinned_bytes)
        if charged > room:
            return _shorten(_unpin(tail), room)
        self._leases[engine, request] = Lease(tail, charged)
        self._charged[engine] += charged
        self.pinned_bytes += charged
        return tail.chunk + 1

    def drop(self, engine: EngineKey, request: str) -> tuple[Entry, list[Entry]] | None:
        """End a lease; return its last entry and the entries that are no longer pinned, deepest first."""
        lease = self._leases.pop((engine, request), None)
        if lease is None:
            return None
        self._charged[engine] -= lease.charged_bytes
        if not self._charged[engine]:
            del self._charged[engine]
        unpinned = _unpin(lease.tail)
        self.pinned_bytes -= sum(entry.num_bytes for entry in unpinned)
        return lease.tail, unpinned

    def requests(self, engine: EngineKey) -> list[str]:
        return [request for key, request in self._leases if key == engine]

    def tails(self) -> list[Entry]:
        return [lease.tail for lease in self._leases.values()]

    def __len__(self) -> int:
        return len(self._leases)

    def check(self) -> None:
        """Assert that pins and pinned bytes are those of the leases."""
        ends = Counter(self.tails())
        pinned = set(ends)
        pins = Counter(ends)
        for tail in ends:
            for entry in tail.path(tail.chunk):
                parent = entry.parent
                assert parent is not None
                pins[parent] += 1
                if parent in pinned:
                    break
                pinned.add(parent)
        for entry in pinned:
            assert entry.leases == ends[entry], "leases are not where they end"
            assert entry.pins == pins[entry], "pins are not those of the leases"
        assert self.pinned_bytes == sum(entry.num_bytes for entry in pinned), "pinned bytes are wrong"
        charged: Counter[EngineKey] = Counter()
        for (engine, _), lease in self._leases.items():
            charged[engine] += lease.charged_bytes
        assert +charged == +self._charged, "charged bytes are wrong"


def _pin(tail: Entry) -> int:
    """Pin the path to `tail` and return the bytes that were not pinned before."""
    tail.leases += 1
    num_bytes = 0
    entry: Entry | None = tail
    while entry is not None:
        entry.pins += 1
        if entry.pins > 1:
            break
        num_bytes += entry.num_bytes
        entry = entry.parent
    return num_bytes


def _unpin(tail: Entry) -> list[Entry]:
    """Undo `_pin` and return the entries that are no longer pinned, deepest first."""
    tail.leases -= 1
    unpinned = []
    entry: Entry | None = tail
    while entry is not None:
        entry.pins -= 1
        if entry.pins:
            break
        unpinned.append(entry)
        entry = entry.parent
    return unpinned


def _shorten(path: list[Entry], room: int) -> int:
    """Return the boundary of the longest part of a path, given deepest first, that has at most `room` bytes."""
    boundary = path[-1].chunk
    for entry in reversed(path):
        room -= entry.num_bytes
        if room < 0:
            break
        boundary = entry.chunk + 1
    return boundary


class Reservations:
    """Reservations and the bytes they keep."""

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self._last_id = 0
        self._held: dict[ReservationId, Held] = {}

    def add(self, held: Held) -> ReservationId:
        self._last_id += 1
        self._held[ReservationId(self._last_id)] = held
        self.reserved_bytes += _reserved_bytes(held)
        return ReservationId(self._last_id)

    def end(self, engine: EngineKey, reservation: ReservationId) -> Held | None:
        """Take out a reservation; None when this engine has no such one."""
        held = self._held.get(reservation)
        if held is None or held.engine != engine:
            return None
        del self._held[reservation]
        self.reserved_bytes -= _reserved_bytes(held)
        return held

    def of(self, engine: EngineKey) -> list[ReservationId]:
        return [number for number, held in self._held.items() if held.engine == engine]

    def all(self) -> list[Held]:
        return list(self._held.values())

    def __len__(self) -> int:
        return len(self._held)


def _reserved_bytes(held: Held) -> int:
    return sum(entry.shape.object_bytes[g] for entry, g, _ in held.objects)
