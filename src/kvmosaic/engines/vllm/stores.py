"""From the chunks that the frontier passed to a reservation, and from its answer to a store plan.

Only what this step's tables hold can be stored: a block that is null there is gone. A state page stands at a
boundary only if a step ended exactly there, or the engine hands it over in this step. Pure; called by the
scheduler half.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvmosaic.core.types import EXTENT, BootId, Kind, Outcome, ReservationId
from kvmosaic.engines.plans import BlockIds, CopyPlan, StorePlan
from kvmosaic.engines.tables import Tables, ids_at, kept_columns
from kvmosaic.layout.groups import Geometry
from kvmosaic.protocol.messages import Chain, Reserved

HandOvers = Iterable[tuple[int, int, int]]
"""(group, block id, number of tokens): exact states the engine hands over in this step."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Chunks [first, end) of one request. `block_ids[g][i]` are the blocks of object group g's i-th group, shape
    [end - first, kept_blocks]; `writable[g]` says per chunk whether the object can be written at all."""

    first: int
    end: int
    digests: Sequence[bytes]
    block_ids: tuple[tuple[BlockIds, ...], ...]
    writable: npt.NDArray[np.bool_]

    def chain(self) -> Chain:
        """The candidate as a reservation asks for it."""
        bits = np.uint32(1) << np.arange(len(self.writable), dtype=np.uint32)
        wanted = (self.writable.T * bits).sum(axis=1, dtype=np.uint32)
        return Chain(
            first_chunk=self.first,
            parent=self.digests[self.first - 1] if self.first else b"",
            digest_bytes=len(self.digests[self.first]),
            digests=b"".join(self.digests[self.first : self.end]),
            wanted=wanted.astype("<u4").tobytes(),
        )


def find_candidate(
    geometry: Geometry,
    chunks: tuple[int, int],
    digests: Sequence[bytes],
    tables: Tables,
    states: tuple[set[int], HandOvers],
) -> Candidate:
    """What can be stored of chunks [first, end). `states` are the positions where a step ended, and hand-overs."""
    first, end = chunks
    block_ids = tuple(
        tuple(
            ids_at(tables[group], kept_columns(geometry, objects, position, first, end))
            for position, group in enumerate(objects.groups)
        )
        for objects in geometry.object_groups
    )
    writable = np.stack([np.all([ids.all(axis=1) for ids in of_group], axis=0) for of_group in block_ids])
    for number, objects in enumerate(geometry.object_groups):
        for position, group in enumerate(objects.groups):
            if geometry.groups[group].kind is Kind.STATE:
                held = _states_held(geometry, group, block_ids[number][position], first, states)
                writable[number] &= held
    return Candidate(first, end, digests, block_ids, writable)


def _states_held(
    geometry: Geometry, group: int, pages: BlockIds, first: int, states: tuple[set[int], HandOvers]
) -> npt.NDArray[np.bool_]:
    step_ends, hand_overs = states
    handed = {(tokens, block) for owner, block, tokens in hand_overs if owner == group}
    ends = ((first + 1 + chunk) * geometry.chunk_tokens for chunk in range(len(pages)))
    return np.array(
        [end in step_ends or (end, int(page[-1])) in handed for end, page in zip(ends, pages, strict=True)],
        dtype=bool,
    )


def plan_store(
    geometry: Geometry, candidates: Sequence[Candidate], reserved: Reserved, boot: tuple[BootId, int]
) -> StorePlan | None:
    """The copies of all granted objects; None when nothing was granted."""
    if not reserved.reservation:
        return None
    rows = np.concatenate([np.argwhere(candidate.writable.T) for candidate in candidates])
    owners = np.repeat(np.arange(len(candidates)), [int(candidate.writable.sum()) for candidate in candidates])
    granted = np.frombuffer(reserved.outcomes, dtype=np.uint8) == Outcome.GRANTED
    rows, owners = rows[granted], owners[granted]
    copies, numbers = [], []
    for group in range(len(geometry.object_groups)):
        objects = np.flatnonzero(rows[:, 1] == group)
        if objects.size:
            copies.append(_copy_group(group, objects, candidates, (owners, rows[:, 0]), reserved))
            numbers.append(objects)
    return StorePlan(
        boot_id=boot[0],
        epoch=boot[1],
        reservation=ReservationId(reserved.reservation),
        num_objects=len(rows),
        copies=tuple(copies),
        numbers=tuple(numbers),
    )


def _copy_group(
    group: int,
    objects: npt.NDArray[np.int64],
    candidates: Sequence[Candidate],
    places: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
    reserved: Reserved,
) -> CopyPlan:
    owners, chunks = places
    counts = np.frombuffer(reserved.extent_counts, dtype="<u4").astype(np.int64)
    ends = np.cumsum(counts) * EXTENT.size
    starts = ends - counts * EXTENT.size
    positions = range(len(candidates[0].block_ids[group]))
    return CopyPlan(
        object_group=group,
        num_objects=len(objects),
        extents=b"".join(reserved.extents[starts[i] : ends[i]] for i in objects),
        extent_counts=counts[objects].astype("<u4").tobytes(),
        block_ids=tuple(
            np.stack([candidates[owners[i]].block_ids[group][position][chunks[i]] for i in objects])
            for position in positions
        ),
    )
