"""From a leased hit and the engine's tables to a load plan, or to the verdict that it cannot be covered.

The engine hashes the whole table when a load ends, so every non-null block between its own hit and the boundary
must be written, in every cacheable group. Pure; called by the scheduler half.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmosaic.core.types import BootId
from kvmosaic.engines.plans import CopyPlan, LoadPlan
from kvmosaic.engines.tables import Tables, ids_at, kept_columns
from kvmosaic.layout.groups import Geometry
from kvmosaic.protocol.messages import Hit

NO_BOOT = BootId("")
"""No server has this boot id, so a plan that carries it fails on every rank."""


def failing_load(request: str) -> LoadPlan:
    """A plan that every rank reports as failed, so that the engine computes the tokens itself."""
    return LoadPlan(NO_BOOT, 0, request, ())


def plan_load(geometry: Geometry, hit: Hit, tables: Tables, tokens: tuple[int, int]) -> tuple[CopyPlan, ...] | None:
    """Copies that fill [own hit, boundary) = `tokens`; None when a non-null block would stay unwritten."""
    own, end = tokens
    uncovered = {
        number: _blocks_to_fill(tables[number], group.block_tokens, own, end)
        for number, group in enumerate(geometry.groups)
        if group.cacheable
    }
    copies = []
    for number in range(len(geometry.object_groups)):
        copy = _copy_group(geometry, number, hit, tables, tokens)
        if copy is None:
            continue
        copies.append(copy)
        for position, group in enumerate(geometry.object_groups[number].groups):
            uncovered[group] -= set(copy.block_ids[position].ravel().tolist())
    if any(uncovered.values()):
        return None
    return tuple(copies)


def _blocks_to_fill(table: Sequence[int], block_tokens: int, own: int, end: int) -> set[int]:
    return set(table[own // block_tokens : -(-end // block_tokens)]) - {0}


def _copy_group(geometry: Geometry, number: int, hit: Hit, tables: Tables, tokens: tuple[int, int]) -> CopyPlan | None:
    objects = geometry.object_groups[number]
    own, end = tokens
    first = hit.first_chunks[number]
    if first >= hit.boundary:
        return None
    block_ids = []
    for position, group in enumerate(objects.groups):
        block_tokens = geometry.groups[group].block_tokens
        columns = kept_columns(geometry, objects, position, first, hit.boundary)
        ids = ids_at(tables[group], columns)
        ids[(columns < own // block_tokens) | (columns >= end // block_tokens)] = 0
        block_ids.append(ids)
    if not any(ids.any() for ids in block_ids):
        return None
    return CopyPlan(
        object_group=number,
        num_objects=hit.boundary - first,
        extents=hit.extents[number],
        extent_counts=hit.extent_counts[number],
        block_ids=tuple(block_ids),
    )
