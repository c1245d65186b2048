"""Engines' memory in miniature: pages in every layout, an arena of plain bytes, and a naive copy to compare with.

The naive copy works on one byte string per piece and knows nothing of spans; `pieces` are written down per layout,
not computed from runs.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvmosaic.core.types import Kind, pack_extents
from kvmosaic.engines.copying import Copier, PageMap, Run
from kvmosaic.engines.plans import CopyPlan
from kvmosaic.layout.groups import Declaration, Geometry, Group, Shard
from kvmosaic.layout.objects import compose

LAYERS, HEADS, HEAD_BYTES, PADDING, NUM_BLOCKS = 3, 2, 20, 7, 16
PAYLOAD = HEADS * HEAD_BYTES
GUARD_BYTES = 64

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Piece:
    """In block b: bytes [offset + b * stride, + num_bytes) of the storage, contiguous in the object too."""

    offset: int
    stride: int
    num_bytes: int


def runs_and_pieces(layout: str, padding: int) -> tuple[list[Run], list[Piece], int]:
    """Runs relative to the storage, in declaration order; the pieces they must amount to; the storage's bytes."""
    page = PAYLOAD + padding
    if layout == "layers outside":  # LBHNC, LBNHC
        starts = [layer * page * NUM_BLOCKS for layer in range(LAYERS)]
        runs = [Run(start, PAYLOAD, page) for start in starts]
        return runs, [Piece(run.address, run.block_stride, run.num_bytes) for run in runs], LAYERS * page * NUM_BLOCKS
    if layout == "heads outside of blocks":  # LHBNC
        starts = [head * HEAD_BYTES * NUM_BLOCKS for head in range(LAYERS * HEADS)]
        runs = [Run(start, HEAD_BYTES, HEAD_BYTES) for start in starts]
        pieces = [Piece(start, HEAD_BYTES, HEAD_BYTES) for start in starts]
        return runs, pieces, LAYERS * PAYLOAD * NUM_BLOCKS
    stride = LAYERS * page
    if layout == "blocks outside":  # BLHNC, BLNHC
        runs = [Run(layer * page, PAYLOAD, stride) for layer in range(LAYERS)]
        pieces = [Piece(0, stride, LAYERS * PAYLOAD)]
        if padding:
            pieces = [Piece(run.address, stride, PAYLOAD) for run in runs]
        return runs, pieces, stride * NUM_BLOCKS
    assert layout == "heads outside of layers"  # BHLNC
    runs = [
        Run((head * LAYERS + layer) * HEAD_BYTES, HEAD_BYTES, stride)
        for layer in range(LAYERS)
        for head in range(HEADS)
    ]
    return runs, [Piece(0, stride, LAYERS * PAYLOAD)], stride * NUM_BLOCKS


LAYOUTS = [
    ("layers outside", 0),
    ("layers outside", PADDING),
    ("heads outside of blocks", 0),
    ("blocks outside", 0),
    ("blocks outside", PADDING),
    ("heads outside of layers", 0),
]


class Rank:
    """One rank's pages: every group in a storage of its own, guards around it, all bytes random."""

    def __init__(self, layouts: list[tuple[str, int]], rng: np.random.Generator) -> None:
        self.storages: list[Bytes] = []
        self.pieces: list[list[Piece]] = []
        self.pages: list[PageMap] = []
        for layout, padding in layouts:
            runs, pieces, num_bytes = runs_and_pieces(layout, padding)
            storage = rng.integers(0, 256, GUARD_BYTES + num_bytes + GUARD_BYTES, dtype=np.uint8)
            origin = storage.ctypes.data + GUARD_BYTES
            moved = [Run(origin + run.address, run.num_bytes, run.block_stride) for run in runs]
            self.pages.append(PageMap(moved, NUM_BLOCKS, range(origin, origin + num_bytes)))
            self.pieces.append([Piece(p.offset + GUARD_BYTES, p.stride, p.num_bytes) for p in pieces])
            self.storages.append(storage)

    def slices(self, group: int, ids: npt.NDArray[np.int64]) -> list[tuple[int, slice]]:
        """(offset in the group's part of an object, bytes of the storage) of every byte string, null blocks too."""
        at, found = 0, []
        for piece in self.pieces[group]:
            for block in ids.tolist():
                start = piece.offset + block * piece.stride
                found.append((at, slice(start, start + piece.num_bytes)))
                at += piece.num_bytes
        return found


def geometry_of(ranks: list[Rank], groups: list[Group], chunk_tokens: int, separate: bool = True) -> Geometry:
    """Group 0 of every rank but the first is a replica of the first rank's."""
    declarations = [
        Declaration(
            rank=number,
            world=len(ranks),
            model="tiny",
            groups=tuple(groups),
            shards=tuple(
                Shard(pages.block_bytes, stored_by=0 if group == 0 else number)
                for group, pages in enumerate(rank.pages)
            ),
            identity={},
            pages="",
            max_num_batched_tokens=chunk_tokens,
            hash_block_tokens=4,
        )
        for number, rank in enumerate(ranks)
    ]
    return compose(declarations, chunk_tokens, separate)


class Store:
    """An arena of plain bytes; objects lie in scattered, shuffled extents with guards between them."""

    def __init__(self, num_bytes: int, rng: np.random.Generator) -> None:
        self.bytes: Bytes = rng.integers(0, 256, num_bytes, dtype=np.uint8)
        self._rng = rng
        self._end = 0

    def place(self, object_bytes: int, pieces: int) -> list[tuple[int, int]]:
        """Extents of one object, as (offset, length); the last one may be too long."""
        cuts = sorted(self._rng.integers(0, object_bytes + 1, pieces - 1).tolist())
        lengths = np.diff([0, *cuts, object_bytes + int(self._rng.integers(0, 9))]).tolist()
        extents = []
        for length in lengths:
            self._end += int(self._rng.integers(1, 9))
            extents.append((self._end, length))
            self._end += length
        assert self._end < len(self.bytes)
        order = self._rng.permutation(len(extents))
        moved = dict(zip(order.tolist(), _pack_again(extents, order), strict=True))
        return [moved[index] for index in range(len(extents))]

    def copier(self, geometry: Geometry, number: int, rank: Rank) -> Copier:
        return Copier(geometry, number, rank.pages, self.bytes.ctypes.data, len(self.bytes))


def _pack_again(extents: list[tuple[int, int]], order: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """The same extents laid out in another order, from the same start."""
    at, moved = extents[0][0], []
    for index in order.tolist():
        moved.append((at, extents[index][1]))
        at += extents[index][1]
    return moved


def plan_of(
    object_group: int, extents: list[list[tuple[int, int]]], block_ids: list[npt.NDArray[np.int64]]
) -> CopyPlan:
    return CopyPlan(
        object_group=object_group,
        num_objects=len(extents),
        extents=b"".join(pack_extents(pieces) for pieces in extents),
        extent_counts=np.array([len(pieces) for pieces in extents], dtype="<u4").tobytes(),
        block_ids=tuple(block_ids),
    )


def object_addresses(extents: list[tuple[int, int]], object_bytes: int) -> npt.NDArray[np.int64]:
    """The arena offset of every byte of an object."""
    return np.concatenate([np.arange(offset, offset + length) for offset, length in extents])[:object_bytes]


def full() -> Group:
    return Group(Kind.FULL, block_tokens=4)


def window(memory_tokens: int) -> Group:
    return Group(Kind.WINDOW, block_tokens=4, memory_tokens=memory_tokens)


def state(block_tokens: int) -> Group:
    return Group(Kind.STATE, block_tokens=block_tokens)
