"""The cache's verbs over index, leases, eviction and extents. Pure: no socket, file, thread or clock.

Loading: `lookup` leases what a boundary needs, `release` ends the lease. Storing: `reserve` hands out extents that
nobody can see, `commit` makes those that were written visible and frees the rest. Nothing is ever taken away from a
reader or a writer: `bury` ends what an engine holds, and its caller has proof that none of its processes lives.
Called by the server's service on the loop's thread; `now` is any clock that does not go back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from kvmosaic.cache.entry import Entry
from kvmosaic.cache.eviction import POLICIES, Evictor
from kvmosaic.cache.index import Index
from kvmosaic.cache.leases import Held, Leases, Reservations
from kvmosaic.cache.values import (
    CacheStats,
    Chain,
    Counters,
    Hit,
    Miss,
    NamespaceStats,
    Reservation,
    pack_objects,
)
from kvmosaic.core.effects import Effect, Evicted, Stored
from kvmosaic.core.types import EngineKey, Extents, Namespace, Outcome, ReservationId
from kvmosaic.errors import RemoteProtocolError
from kvmosaic.layout.fold import fold, needs
from kvmosaic.layout.groups import Geometry
from kvmosaic.memory.extents import ExtentPool


class Cache:
    """Objects of any number of namespaces in one arena."""

    def __init__(self, pool: ExtentPool, policy: str = "LRU") -> None:
        self._pool = pool
        self._indexes: dict[Namespace, Index] = {}
        self._leases = Leases()
        self._reservations = Reservations()
        self._evictor = Evictor(POLICIES[policy]())
        self._counters = Counters()
        self._effects: list[Effect] = []

    def open(self, namespace: Namespace, geometry: Geometry) -> None:
        """Make a namespace known; the other verbs need it to be."""
        if namespace not in self._indexes:
            self._indexes[namespace] = Index(namespace, geometry)

    def lookup(
        self,
        engine: EngineKey,
        request: str,
        namespace: Namespace,
        first_chunk: int,
        digests: Sequence[bytes],
        now: float,
    ) -> Hit | Miss:
        """Lease the largest boundary after `first_chunk` that can be served; the request's earlier lease ends.

        The last `lookahead_chunks` digests only have to match; they are not part of any hit.
        """
        index = self._indexes[namespace]
        index.lookups += 1
        self.release(engine, request)
        entries = index.find(digests, first_chunk)
        present = [entry.present for entry in entries]
        groups = index.geometry.object_groups
        limit = first_chunk + len(digests) - index.shape.lookahead_chunks
        boundary, full_chunks = fold(present, first_chunk, groups, limit)
        while boundary > first_chunk:
            tail = entries[boundary - first_chunk - 1]
            allowed = self._leases.take(engine, request, tail, self._pool.usable_bytes)
            if allowed == boundary:
                self._evictor.use(tail, now)
                return _hit(index, first_chunk, entries[: boundary - first_chunk], full_chunks)
            self._counters.capped_leases += 1
            boundary, _ = fold(present, first_chunk, groups, allowed)
        return Miss(full_chunks)

    def release(self, engine: EngineKey, request: str) -> None:
        """End the lease of a request, if it has one."""
        dropped = self._leases.drop(engine, request)
        if dropped is None:
            return
        tail, unpinned = dropped
        if tail.gone:
            for entry in unpinned:
                self._free_all(entry)
        else:
            self._evictor.nominate(tail, tail.shape.longest_window_chunks)
            self._evictor.offer(tail)

    def reserve(self, engine: EngineKey, namespace: Namespace, chains: Sequence[Chain], now: float) -> Reservation:
        """Find room for the wanted objects of each chain that are not here yet."""
        index = self._indexes[namespace]
        for chain in chains:
            _check_chain(index, chain)
        held = Held(engine, namespace, index.generation, [])
        outcomes = bytearray()
        for chain in chains:
            self._reserve_chain(index, chain, now, held, outcomes)
        reservation = self._reservations.add(held) if held.objects else ReservationId(0)
        self._counters.present_objects += outcomes.count(Outcome.PRESENT)
        self._counters.no_room_objects += outcomes.count(Outcome.NO_ROOM)
        self._counters.not_worth_it_objects += outcomes.count(Outcome.NOT_WORTH_IT)
        return Reservation(reservation, bytes(outcomes), [extents for _, _, extents in held.objects])

    def commit(self, engine: EngineKey, reservation: ReservationId, written: bytes, now: float) -> int:
        """End a reservation; its objects with a 1 in `written` become visible unless their generation is over.

        Returns how many did. An id that is not a reservation of this engine changes nothing.
        """
        held = self._reservations.end(engine, reservation)
        if held is None:
            self._counters.unknown_commits += 1
            return 0
        index = self._indexes[held.namespace]
        if len(written) != len(held.objects):
            written = bytes(len(held.objects))
        if held.generation != index.generation:
            self._counters.late_commits += 1
            for _, _, extents in held.objects:
                self._pool.free(extents)
            return 0
        for (entry, g, extents), done in zip(held.objects, written, strict=True):
            entry.writing &= ~(1 << g)
            if done:
                self._show(index, entry, g, extents)
            else:
                self._pool.free(extents)
        visible = len(written) - written.count(0)
        self._settle_written(held, visible, now)
        self._counters.committed_objects += visible
        self._counters.aborted_objects += len(written) - visible
        return visible

    def bury(self, engine: EngineKey) -> None:
        """End everything an engine holds. Its processes are dead: nobody reads or writes for it any more."""
        for reservation in self._reservations.of(engine):
            self.commit(engine, reservation, b"", 0.0)
        for request in self._leases.requests(engine):
            self.release(engine, request)

    def clear(self, namespace: Namespace | None = None) -> int:
        """Forget all objects of one namespace, or of all; return how many.

        What is leased stays in place until released, what is reserved until committed, but neither is seen again.
        """
        indexes = list(self._indexes.values()) if namespace is None else [self._indexes[namespace]]
        forgotten = sum(sum(index.objects) for index in indexes)
        for index in indexes:
            for entry in index.clear():
                self._effects += [_evicted(entry, g) for g, _ in entry.objects()]
                if not entry.pins:
                    self._free_all(entry)
        self._evictor.sweep()
        self._counters.cleared_objects += forgotten
        return forgotten

    def drop_empty(self, used: Collection[Namespace | None]) -> None:
        """Forget namespaces that nobody uses, that hold nothing, and that no lease or reservation needs."""
        held = {tail.shape.namespace for tail in self._leases.tails()}
        held |= {reservation.namespace for reservation in self._reservations.all()}
        for namespace in [name for name, index in self._indexes.items() if not index and name not in held]:
            if namespace not in used:
                del self._indexes[namespace]

    def take_effects(self) -> list[Effect]:
        """Return what happened since the last call."""
        effects, self._effects = self._effects, []
        return effects

    def stats(self) -> CacheStats:
        leases = [tail.shape.namespace for tail in self._leases.tails()]
        reservations = [held.namespace for held in self._reservations.all()]
        return CacheStats(
            namespaces=tuple(
                NamespaceStats(
                    namespace=namespace,
                    geometry=index.geometry,
                    generation=index.generation,
                    objects=tuple(index.objects),
                    object_bytes=tuple(
                        count * size for count, size in zip(index.objects, index.shape.object_bytes, strict=True)
                    ),
                    lookups=index.lookups,
                    hits=index.hits,
                    hit_chunks=index.hit_chunks,
                    leases=leases.count(namespace),
                    reservations=reservations.count(namespace),
                )
                for namespace, index in self._indexes.items()
            ),
            leases=len(self._leases),
            leased_bytes=self._leases.pinned_bytes,
            reservations=len(self._reservations),
            reserved_bytes=self._reservations.reserved_bytes,
            counters=replace(self._counters),
        )

    def check(self) -> None:
        """Assert that index, leases, reservations, eviction and extents agree."""
        live = [entry for index in self._indexes.values() for entry in index]
        pinned = {entry for tail in self._leases.tails() for entry in tail.path(tail.chunk + 1)}
        forgotten = {entry for entry in pinned if entry.gone}
        held = [extents for entry in [*live, *forgotten] for _, extents in entry.objects()]
        writing: dict[Entry, int] = {}
        for reservation in self._reservations.all():
            held += [extents for _, _, extents in reservation.objects]
            if reservation.generation == self._indexes[reservation.namespace].generation:
                for entry, g, _ in reservation.objects:
                    assert not writing.get(entry, 0) >> g & 1, "two writers of one object"
                    writing[entry] = writing.get(entry, 0) | 1 << g
        self._pool.check(held)
        for index in self._indexes.values():
            index.check()
        for entry in live:
            assert entry.writing == writing.pop(entry, 0), "a write without a reservation"
            assert not entry.pins or entry in pinned, "a pin without a lease"
        assert not writing, "a reservation of an entry that has gone"
        self._leases.check()
        self._evictor.check(live)

    def _reserve_chain(self, index: Index, chain: Chain, now: float, held: Held, outcomes: bytearray) -> None:
        """Answer for one chain; after the first chunk that cannot be complete, the rest is not worth it."""
        parent = index.get(chain.parent) if chain.first_chunk else None
        full = index.shape.full_mask
        if parent is not None and (parent.chunk != chain.first_chunk - 1 or not _has_or_gets(parent, full)):
            parent = None
        worth_it = parent is not None or chain.first_chunk == 0
        for digest, wanted in zip(chain.digests, chain.wanted, strict=True):
            entry = index.grow(digest, parent, now) if worth_it else None
            if entry is None:
                worth_it = False
                outcomes += bytes((Outcome.NOT_WORTH_IT,)) * wanted.bit_count()
                continue
            self._reserve_entry(entry, wanted, held, outcomes)
            worth_it = _has_or_gets(entry, full)
            parent = entry
        if parent is not None:
            self._evictor.use(parent, now)
            self._settle(parent)

    def _reserve_entry(self, entry: Entry, wanted: int, held: Held, outcomes: bytearray) -> None:
        full = entry.shape.full_mask
        worth_it = _has_or_gets(entry, full & ~wanted)
        for g, num_bytes in enumerate(entry.shape.object_bytes):
            bit = 1 << g
            if not wanted & bit:
                continue
            if (entry.present | entry.writing) & bit:
                outcomes.append(Outcome.PRESENT)
                continue
            if not worth_it:
                outcomes.append(Outcome.NOT_WORTH_IT)
                continue
            entry.writing |= bit  # so that making room does not take this entry away
            extents = self._allocate(num_bytes)
            if extents is None:
                entry.writing &= ~bit
                outcomes.append(Outcome.NO_ROOM)
                worth_it = not full & bit
                continue
            held.objects.append((entry, g, extents))
            outcomes.append(Outcome.GRANTED)

    def _allocate(self, num_bytes: int) -> Extents | None:
        """Return extents, evicting as much as that takes; None when readers and writers hold too much."""
        kept_bytes = self._leases.pinned_bytes + self._reservations.reserved_bytes
        if num_bytes > self._pool.usable_bytes - kept_bytes:
            return None
        while (extents := self._pool.allocate(num_bytes)) is None:
            if not self._evict():
                return None
        return extents

    def _evict(self) -> bool:
        """Evict the next window object or the next leaf with all that is dead weight without it."""
        window = self._evictor.next_window()
        if window is not None:
            self._drop(*window)
            return True
        leaf = self._evictor.next_leaf()
        if leaf is None:
            return False
        while True:
            for g, _ in leaf.objects():
                self._drop(leaf, g)
            parent, stamp = leaf.parent, leaf.stamp
            self._remove(leaf)
            if parent is None:
                return True
            dead_weight = parent.is_evictable and not parent.is_servable and parent.stamp <= stamp
            parent.stamp = max(parent.stamp, stamp)
            if not dead_weight:
                self._settle(parent)
                return True
            leaf = parent

    def _settle_written(self, held: Held, visible: int, now: float) -> None:
        """Tell the evictor about entries that a reservation has ended for, and remove those left empty."""
        entries = dict.fromkeys(entry for entry, _, _ in held.objects)
        for entry in entries:
            if visible and entry.child is None:
                self._evictor.use(entry, now)
            self._evictor.nominate(entry, 1)
            if entry.parent is not None and entry.parent not in entries:
                self._evictor.nominate(entry.parent, entry.shape.longest_window_chunks)
        for entry in entries:
            self._settle(entry)

    def _settle(self, entry: Entry) -> None:
        """Remove an entry that nothing keeps, and ancestors that only it kept; else offer it for eviction."""
        while entry.is_empty and not entry.gone:
            parent = entry.parent
            self._remove(entry)
            if parent is None:
                return
            entry = parent
        self._evictor.offer(entry)

    def _remove(self, entry: Entry) -> None:
        self._indexes[entry.shape.namespace].remove(entry)
        parent = entry.parent
        if parent is not None and parent.child is not None and parent.child.next_sibling is None:
            # Prompts no longer part there.
            self._evictor.nominate(parent, parent.shape.longest_window_chunks)

    def _show(self, index: Index, entry: Entry, g: int, extents: Extents) -> None:
        index.put(entry, g, extents)
        num_bytes = index.shape.object_bytes[g]
        if entry.pins:
            self._leases.pinned_bytes += num_bytes
        self._effects.append(Stored(index.namespace, entry.digest, g, num_bytes, extents))

    def _drop(self, entry: Entry, g: int) -> None:
        """Evict one object."""
        self._effects.append(_evicted(entry, g))
        num_bytes = entry.shape.object_bytes[g]
        if entry.pins:
            self._leases.pinned_bytes -= num_bytes
        self._pool.free(self._indexes[entry.shape.namespace].take(entry, g))
        self._counters.evicted_objects += 1
        self._counters.evicted_bytes += num_bytes

    def _free_all(self, entry: Entry) -> None:
        """Free the objects of an entry that has gone and that nobody reads."""
        for _, extents in entry.objects():
            self._pool.free(extents)
        entry.extents = []
        entry.present = entry.num_bytes = 0


def _hit(index: Index, first_chunk: int, entries: Sequence[Entry], full_chunks: int) -> Hit:
    """Count and describe a hit on the entries of chunks `first_chunk`, `first_chunk` + 1, …"""
    index.hits += 1
    index.hit_chunks += len(entries)
    boundary = first_chunk + len(entries)
    firsts = tuple(needs(group, first_chunk, boundary) for group in index.geometry.object_groups)
    packed = [
        pack_objects([entry.extents[g] for entry in entries[first - first_chunk :]]) for g, first in enumerate(firsts)
    ]
    extents, counts = zip(*packed, strict=True)
    return Hit(boundary, full_chunks, firsts, extents, counts)


def _has_or_gets(entry: Entry, mask: int) -> bool:
    return (entry.present | entry.writing) & mask == mask


def _evicted(entry: Entry, g: int) -> Evicted:
    return Evicted(entry.shape.namespace, entry.digest, g, entry.shape.object_bytes[g])


def _check_chain(index: Index, chain: Chain) -> None:
    """Refuse what the outcomes could not be matched to."""
    groups = len(index.objects)
    if len(chain.digests) != len(chain.wanted):
        raise RemoteProtocolError(f"{len(chain.digests)} digests with {len(chain.wanted)} masks of wanted objects")
    if any(wanted >> groups for wanted in chain.wanted):
        raise RemoteProtocolError(f"a wanted object of a group that is not among the {groups} object groups")
