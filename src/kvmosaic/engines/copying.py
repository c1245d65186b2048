"""Pages to extents and back: where the bytes of a block lie, and the copies that move them.

Owns the byte arithmetic of one rank; knows addresses and lengths, never an engine's classes. Called by
engines.transfers with a mapped arena, on the engine's or on the copy thread; keeps no state between two calls.
A plan is checked as a whole before its first byte moves, since a wrong address would kill the engine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvmosaic.core.types import EXTENT, Kind
from kvmosaic.engines.plans import BlockIds, CopyPlan
from kvmosaic.errors import RemoteProtocolError
from kvmosaic.layout.groups import Geometry, ObjectGroup

Stop = Callable[[], bool]
Ints = npt.NDArray[np.int64]

# Objects are expanded into spans in slices of about this many bytes, so that a long load needs little memory.
_SLICE_BYTES = 256 << 20
# How many spans may pass between two looks at `stop`.
_SPANS_PER_LOOK = 64


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes [address + b * block_stride, + num_bytes) of every block b."""

    address: int
    num_bytes: int
    block_stride: int


class PageMap:
    """Where one rank keeps the payload of one group: for block b, the bytes of each run in turn.

    Runs that touch within every block are one run, so the order of the bytes depends on the layout alone. Empty
    when the group has no layer on this rank.
    """

    def __init__(self, runs: Sequence[Run], num_blocks: int, storage: range) -> None:
        self.num_blocks = num_blocks
        merged = _merge_runs(sorted(runs, key=lambda run: run.address))
        for run in merged:
            end = run.address + (num_blocks - 1) * run.block_stride + run.num_bytes
            assert storage.start <= run.address < end <= storage.stop, "a run leaves its storage"
        self.addresses = np.array([run.address for run in merged], dtype=np.int64)
        self.strides = np.array([run.block_stride for run in merged], dtype=np.int64)
        self.lengths = np.array([run.num_bytes for run in merged], dtype=np.int64)

    @property
    def block_bytes(self) -> int:
        """Payload of one block."""
        return int(self.lengths.sum())


class Copier:
    """Copies between one rank's pages and the objects of one mapped arena."""

    def __init__(
        self, geometry: Geometry, rank: int, pages: Sequence[PageMap], arena_address: int, arena_bytes: int
    ) -> None:
        self._geometry = geometry
        self._rank = rank
        self._pages = pages
        self._arena_address = arena_address
        self._arena_bytes = arena_bytes
        for objects in geometry.object_groups:
            self._check_offsets(objects)

    def store(self, plan: CopyPlan, stop: Stop) -> npt.NDArray[np.bool_]:
        """Copy pages into objects; which objects are complete now.

        An object with a null block is not copied and not complete: its bytes would be someone else's.
        """
        extents = _ExtentTable(plan, self._object_bytes(plan), self._arena_bytes)
        self._check_blocks(plan)
        complete = np.ones(plan.num_objects, dtype=np.bool_)
        for position, ids in enumerate(plan.block_ids):
            if self._part(plan, position) is not None:
                complete &= (ids != 0).all(axis=1)
        for chosen in self._slices(plan, np.flatnonzero(complete)):
            for position, ids in enumerate(plan.block_ids):
                part = self._part(plan, position)
                if part is None or not part.writes:
                    continue
                page, arena, length = _spans(part, ids[chosen], chosen, extents)
                if not _copy(arena + self._arena_address, page, length, stop):
                    complete[chosen[0] :] = False
                    return complete
        return complete

    def load(self, plan: CopyPlan, stop: Stop) -> bool:
        """Copy objects into pages, null blocks left out; False when `stop` said so before the end."""
        extents = _ExtentTable(plan, self._object_bytes(plan), self._arena_bytes)
        self._check_blocks(plan)
        for chosen in self._slices(plan, np.arange(plan.num_objects)):
            for position, ids in enumerate(plan.block_ids):
                part = self._part(plan, position)
                if part is None:
                    continue
                page, arena, length = _spans(part, ids[chosen], chosen, extents)
                if not _copy(page, arena + self._arena_address, length, stop):
                    return False
        return True

    def part_bytes(self, plan: CopyPlan) -> int:
        """This rank's bytes of all objects of a plan."""
        objects = self._geometry.object_groups[plan.object_group]
        kept = zip(objects.groups, objects.kept_blocks, strict=True)
        return plan.num_objects * sum(blocks * self._pages[group].block_bytes for group, blocks in kept)

    def is_state(self, plan: CopyPlan) -> bool:
        """Whether the plan's objects are states, which cannot be stored at a later step."""
        return self._geometry.object_groups[plan.object_group].kind is Kind.STATE

    def _object_bytes(self, plan: CopyPlan) -> int:
        if not 0 <= plan.object_group < len(self._geometry.object_groups):
            raise RemoteProtocolError(f"a plan names object group {plan.object_group}, which does not exist")
        return self._geometry.object_groups[plan.object_group].object_bytes

    def _part(self, plan: CopyPlan, position: int) -> _Part | None:
        objects = self._geometry.object_groups[plan.object_group]
        pages = self._pages[objects.groups[position]]
        if not len(pages.lengths):
            return None
        offset = objects.offsets[self._rank][position]
        return _Part(pages, objects.kept_blocks[position], offset, objects.writes[self._rank][position])

    def _slices(self, plan: CopyPlan, objects: Ints) -> Iterator[Ints]:
        count = max(1, _SLICE_BYTES // max(1, self._object_bytes(plan)))
        for start in range(0, len(objects), count):
            yield objects[start : start + count]

    def _check_offsets(self, objects: ObjectGroup) -> None:
        offsets = objects.offsets[self._rank]
        for group, kept, offset in zip(objects.groups, objects.kept_blocks, offsets, strict=True):
            end = offset + kept * self._pages[group].block_bytes
            if end > objects.object_bytes:
                raise RemoteProtocolError(
                    f"group {group} ends at byte {end} of objects of {objects.object_bytes} bytes"
                )

    def _check_blocks(self, plan: CopyPlan) -> None:
        objects = self._geometry.object_groups[plan.object_group]
        if len(plan.block_ids) != len(objects.groups):
            raise RemoteProtocolError("a plan's groups are not those of its object group")
        for ids, group, kept in zip(plan.block_ids, objects.groups, objects.kept_blocks, strict=True):
            if ids.shape != (plan.num_objects, kept):
                raise RemoteProtocolError(f"block ids of shape {ids.shape}, not {(plan.num_objects, kept)}")
            num_blocks = self._pages[group].num_blocks
            if ids.size and not 0 <= ids.min() <= ids.max() < num_blocks:
                raise RemoteProtocolError(f"a block id of group {group} is not in [0, {num_blocks})")


def first_objects(plan: CopyPlan, count: int) -> CopyPlan:
    """The plan for its first `count` objects; all of them when there are not as many."""
    if count >= plan.num_objects:
        return plan
    extent_counts = plan.extent_counts[: 4 * count]
    num_extents = int(np.frombuffer(extent_counts, dtype="<u4").sum())
    return CopyPlan(
        object_group=plan.object_group,
        num_objects=count,
        extents=plan.extents[: EXTENT.size * num_extents],
        extent_counts=extent_counts,
        block_ids=tuple(ids[:count] for ids in plan.block_ids),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """The bytes of one group of this rank in every object: [offset, offset + kept * block_bytes).

    Run after run, and within a run block after block:

        offset                                         offset + kept * block_bytes
        [ run 0, block 0 | run 0, block 1 | ... ][ run 1, block 0 | ... ]
    """

    pages: PageMap
    kept: int
    offset: int
    writes: bool


class _ExtentTable:
    """Translates bytes of a plan's objects to bytes of the arena.

    The extents of all objects are laid end to end on one line: `line[i]` is where extent i starts on it, and
    `objects[o]` where object o does.
    """

    def __init__(self, plan: CopyPlan, object_bytes: int, arena_bytes: int) -> None:
        if len(plan.extent_counts) % 4 or len(plan.extents) % EXTENT.size:
            raise RemoteProtocolError("a plan's extents are cut off")
        counts = np.frombuffer(plan.extent_counts, dtype="<u4").astype(np.int64)
        pieces = np.frombuffer(plan.extents, dtype="<u8").reshape(-1, 2)
        if len(counts) != plan.num_objects or counts.sum() != len(pieces):
            raise RemoteProtocolError("a plan's extents do not match its objects")
        if (pieces > arena_bytes).any() or (pieces.sum(axis=1) > arena_bytes).any():
            raise RemoteProtocolError(f"an extent lies outside an arena of {arena_bytes} bytes")
        self.offsets: Ints = pieces[:, 0].astype(np.int64)
        line = np.concatenate(([0], np.cumsum(pieces[:, 1].astype(np.int64))))
        self.line: Ints = line
        firsts = np.concatenate(([0], np.cumsum(counts)))
        self.objects: Ints = line[firsts[:-1]]
        if (np.diff(line[firsts]) < object_bytes).any():
            raise RemoteProtocolError(f"the extents of an object are shorter than its {object_bytes} bytes")

    def split(self, start: Ints, length: Ints) -> tuple[Ints, Ints, Ints]:
        """Cut spans [start, start + length) of the line at the ends of extents.

        For every piece: the span it is of, its start on the line, and its extent.
        """
        first = np.searchsorted(self.line, start, side="right") - 1
        last = np.searchsorted(self.line, start + length, side="left") - 1
        pieces = last - first + 1
        span = np.repeat(np.arange(len(start)), pieces)
        nth = np.arange(len(span)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        extent = first[span] + nth
        return span, np.maximum(start[span], self.line[extent]), extent


def _spans(part: _Part, ids: BlockIds, chosen: Ints, extents: _ExtentTable) -> tuple[Ints, Ints, Ints]:
    """Page address, arena offset and length of every span of the chosen objects, null blocks left out."""
    pages = part.pages
    lengths = pages.lengths
    run_starts = part.offset + part.kept * (np.cumsum(lengths) - lengths)
    in_object = run_starts[:, None] + lengths[:, None] * np.arange(part.kept)
    shape = (len(chosen), len(lengths), part.kept)
    real = np.broadcast_to((ids != 0)[:, None, :], shape).ravel()
    line = (extents.objects[chosen, None, None] + in_object).ravel()[real]
    page = (pages.addresses[:, None] + pages.strides[:, None] * ids[:, None, :]).ravel()[real]
    length = np.broadcast_to(lengths[:, None], shape).ravel()[real]

    span, piece_line, extent = extents.split(line, length)
    piece_end = np.minimum(line[span] + length[span], extents.line[extent + 1])
    arena = extents.offsets[extent] + piece_line - extents.line[extent]
    return _join(page[span] + piece_line - line[span], arena, piece_end - piece_line)


def _join(page: Ints, arena: Ints, length: Ints) -> tuple[Ints, Ints, Ints]:
    """Make one span of neighbours that touch on both sides."""
    if not len(length):
        return page, arena, length
    touch = (page[:-1] + length[:-1] == page[1:]) & (arena[:-1] + length[:-1] == arena[1:])
    heads = np.flatnonzero(np.concatenate(([True], ~touch)))
    return page[heads], arena[heads], np.add.reduceat(length, heads)


def _copy(target: Ints, source: Ints, length: Ints, stop: Stop) -> bool:
    """Copy span by span; True when all of them were. Each memmove runs without the interpreter lock."""
    memmove = ctypes.memmove
    spans = list(zip(target.tolist(), source.tolist(), length.tolist(), strict=True))
    for start in range(0, len(spans), _SPANS_PER_LOOK):
        if stop():
            return False
        for to, from_, num_bytes in spans[start : start + _SPANS_PER_LOOK]:
            memmove(to, from_, num_bytes)
    return True


def _merge_runs(runs: Sequence[Run]) -> list[Run]:
    merged: list[Run] = []
    for run in runs:
        last = merged[-1] if merged else None
        if last and last.block_stride == run.block_stride and last.address + last.num_bytes == run.address:
            merged[-1] = Run(last.address, last.num_bytes + run.num_bytes, run.block_stride)
        else:
            merged.append(run)
    return merged
