"""Which bytes of the arena are free. Knows offsets and lengths, no keys, objects or memory.

An object takes whole quanta, the lowest free first; what is left of it, less than a quantum, is rounded up by at
most a sixteenth and cut into power-of-two pieces that a buddy scheme packs into shared quanta. When no quantum is
free any more the bulk is assembled from such pieces as well, so an allocation fails only when the free bytes do not
suffice, however the mix of sizes changes. Called by the cache, on the server's loop thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush

from kvmosaic.core.types import Extents, pack_extents, unpack_extents

GRAIN_BYTES = 4096
QUANTUM_BYTES = 1 << 20


class ExtentPool:
    """Hands out pieces of [0, usable_bytes). A piece belongs to the caller until it is freed."""

    def __init__(self, capacity_bytes: int, quantum_bytes: int = QUANTUM_BYTES) -> None:
        if quantum_bytes < GRAIN_BYTES or quantum_bytes & (quantum_bytes - 1):
            raise ValueError(f"a quantum of {quantum_bytes} bytes is not a power of two >= {GRAIN_BYTES}")
        self.quantum_bytes = quantum_bytes
        self.capacity_bytes = capacity_bytes // quantum_bytes * quantum_bytes
        self.usable_bytes = 0
        self.used_bytes = 0
        self._quanta = _Quanta()
        # _pieces[k]: offsets of the free pieces of GRAIN_BYTES << k bytes; each is a multiple of its size and its
        # buddy is not free. A dict as a set: popitem takes the last one freed, in constant time and always the same.
        self._pieces: list[dict[int, None]] = [{} for _ in range((quantum_bytes // GRAIN_BYTES).bit_length() - 1)]

    def grow(self, to_bytes: int) -> None:
        """Raise the usable mark; bytes below it may be handed out. A lower mark than before changes nothing."""
        mark = min(to_bytes, self.capacity_bytes) // self.quantum_bytes
        old = self.usable_bytes // self.quantum_bytes
        if mark > old:
            self._quanta.give(old, mark - old)
            self.usable_bytes = mark * self.quantum_bytes

    def round_up(self, num_bytes: int) -> int:
        """Return how many bytes an object of `num_bytes` takes."""
        rest = num_bytes % self.quantum_bytes
        grain = max(GRAIN_BYTES, 1 << max(0, rest.bit_length() - 5))
        return num_bytes - rest + -(-rest // grain) * grain

    def allocate(self, num_bytes: int) -> Extents | None:
        """Return extents of at least `num_bytes` bytes, or None when the free bytes do not suffice."""
        left = self.round_up(num_bytes)
        if left <= 0 or left > self.usable_bytes - self.used_bytes:
            return None
        self.used_bytes += left
        taken: list[tuple[int, int]] = []
        while left >= self.quantum_bytes and (run := self._quanta.take(left // self.quantum_bytes)):
            start, count = run
            taken.append((start * self.quantum_bytes, count * self.quantum_bytes))
            left -= count * self.quantum_bytes
        while left:
            offset, length = self._take_piece(left)
            taken.append((offset, length))
            left -= length
        return pack_extents(_merge_adjacent(taken))

    def free(self, extents: bytes) -> None:
        """Take back what `allocate` returned."""
        for offset, length in unpack_extents(extents):
            self.used_bytes -= length
            end = offset + length
            first = -(-offset // self.quantum_bytes)
            last = end // self.quantum_bytes
            if first <= last:
                # | pieces )[ whole quanta )[ pieces )
                if first < last:
                    self._quanta.give(first, last - first)
                self._give_pieces(offset, first * self.quantum_bytes)
                self._give_pieces(last * self.quantum_bytes, end)
            else:
                self._give_pieces(offset, end)

    def check(self, held: Iterable[bytes] | None = None) -> None:
        """Assert that the free pieces do not overlap, that free + used = usable, and, when the caller passes every
        extent it holds, that free and held pieces tile the usable bytes exactly."""
        pieces = [(start * self.quantum_bytes, count * self.quantum_bytes) for start, count in self._quanta.runs()]
        for k, offsets in enumerate(self._pieces):
            size = GRAIN_BYTES << k
            assert not any(offset % size for offset in offsets), "a free piece is not aligned to its size"
            assert not any(offset ^ size in offsets for offset in offsets), "two free buddies were not merged"
            pieces += [(offset, size) for offset in offsets]
        free_bytes = sum(size for _, size in pieces)
        assert free_bytes + self.used_bytes == self.usable_bytes <= self.capacity_bytes, "bytes were lost"
        if held is not None:
            pieces += [piece for extents in held for piece in unpack_extents(extents)]
            assert sum(size for _, size in pieces) == self.usable_bytes, "held bytes are not the used bytes"
        end = 0
        for offset, size in sorted(pieces):
            assert offset >= end, f"pieces overlap at {offset}"
            end = offset + size
        assert end <= self.usable_bytes, "a piece ends beyond the usable bytes"

    def _take_piece(self, wanted_bytes: int) -> tuple[int, int]:
        """Take the free piece that fits `wanted_bytes` best: the largest power of two not above it, split from a
        larger piece or a quantum if need be, else the largest smaller one."""
        top = len(self._pieces)
        k = min(top, (wanted_bytes // GRAIN_BYTES).bit_length() - 1)
        for larger in range(k, top):
            if self._pieces[larger]:
                return self._split(self._pieces[larger].popitem()[0], larger, k)
        if run := self._quanta.take(1):
            return self._split(run[0] * self.quantum_bytes, top, k)
        for smaller in range(k - 1, -1, -1):
            if self._pieces[smaller]:
                return self._pieces[smaller].popitem()[0], GRAIN_BYTES << smaller
        raise AssertionError("the free bytes do not add up")

    def _split(self, offset: int, k: int, wanted: int) -> tuple[int, int]:
        for half in range(k - 1, wanted - 1, -1):
            self._pieces[half][offset + (GRAIN_BYTES << half)] = None
        return offset, GRAIN_BYTES << wanted

    def _give_pieces(self, start: int, end: int) -> None:
        """Give back [start, end), which lies in one quantum, in the fewest pieces that are multiples of their size."""
        while start < end:
            size = 1 << ((end - start).bit_length() - 1)
            if start:
                size = min(size, start & -start)
            self._give_piece(start, size)
            start += size

    def _give_piece(self, offset: int, size: int) -> None:
        while size < self.quantum_bytes:
            offsets = self._pieces[(size // GRAIN_BYTES).bit_length() - 1]
            assert offset not in offsets, "a piece was freed twice"
            if offset ^ size not in offsets:
                offsets[offset] = None
                return
            del offsets[offset ^ size]
            offset &= ~size
            size *= 2
        self._quanta.give(offset // self.quantum_bytes, 1)


class _Quanta:
    """Free runs of whole quanta, taken lowest first and merged with their neighbours when given back."""

    def __init__(self) -> None:
        self._count_at: dict[int, int] = {}  # first quantum of a run to its length
        self._start_before: dict[int, int] = {}  # end of a run to its first quantum
        self._heap: list[int] = []  # every run's first quantum, and some that are none any more

    def runs(self) -> Iterator[tuple[int, int]]:
        yield from self._count_at.items()

    def take(self, max_count: int) -> tuple[int, int] | None:
        """Return (first quantum, count) with 1 <= count <= max_count from the lowest run, None when none is free."""
        while self._heap and self._heap[0] not in self._count_at:
            heappop(self._heap)
        if not self._heap:
            return None
        start = heappop(self._heap)
        count = self._count_at.pop(start)
        taken = min(count, max_count)
        if taken < count:
            self._put(start + taken, count - taken)
        else:
            del self._start_before[start + count]
        return start, taken

    def give(self, start: int, count: int) -> None:
        assert start not in self._count_at, "a quantum was freed twice"
        if (before := self._start_before.pop(start, None)) is not None:
            count += self._count_at.pop(before)
            start = before
        if (after := self._count_at.pop(start + count, None)) is not None:
            count += after
        self._put(start, count)

    def _put(self, start: int, count: int) -> None:
        self._count_at[start] = count
        self._start_before[start + count] = start
        if len(self._heap) > 2 * len(self._count_at) + 64:
            self._heap = sorted(self._count_at)
        else:
            heappush(self._heap, start)


def _merge_adjacent(pieces: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    start, length = pieces[0]
    for offset, size in pieces[1:]:
        if offset == start + length:
            length += size
        else:
            yield start, length
            start, length = offset, size
    yield start, length
