"""The fold rule: which boundary of a prompt can be served, given what is present. Pure functions.

A boundary L is servable iff each object group g has all chunks of `[max(first, L - reach_g), L + lookahead_g)`,
where the engine itself holds the chunks before `first`:

    chunk   0          first        L - reach       L         L + lookahead
            [  engine's  )[ not needed )[  needed    )[ must match )

Called by the cache (lookup) and by the engine's scheduler half (which chunks a load covers).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmosaic.core.types import Kind
from kvmosaic.layout.groups import ObjectGroup


def fold(present: Sequence[int], first: int, object_groups: Sequence[ObjectGroup], limit: int) -> tuple[int, int]:
    """Return the largest servable boundary in (first, limit], else `first`, and how deep the full groups go.

    Bit g of `present[i]` says that chunk `first + i` has its object of group g; chunks beyond are absent. The
    depth is a chunk index as well; it is `first` when there is no full group.
    """
    full_mask = sum(1 << g for g, group in enumerate(object_groups) if group.kind is Kind.FULL)
    full_chunks = first + _run(present, full_mask) if full_mask else first
    # Each group lowers the boundary to the largest one it can serve itself, until all agree.
    boundary = min(limit, first + len(present))
    agreed = 0
    while boundary > first and agreed < len(object_groups):
        agreed = 0
        for g, group in enumerate(object_groups):
            lowered = _lower(present, first, 1 << g, group, boundary)
            agreed += lowered == boundary
            boundary = lowered
    return max(boundary, first), full_chunks


def needs(group: ObjectGroup, first: int, boundary: int) -> int:
    """Return the first chunk that a load from `first` to `boundary` needs of this object group."""
    return first if group.reach_chunks is None else max(first, boundary - group.reach_chunks)


def _lower(present: Sequence[int], first: int, bit: int, group: ObjectGroup, boundary: int) -> int:
    """Return the largest boundary <= `boundary` that this group can serve, `first` when there is none."""
    if group.reach_chunks is None:
        return max(first, min(boundary, first + _run(present, bit) - group.lookahead_chunks))
    while boundary > first:
        start = needs(group, first, boundary) - first
        stop = boundary + group.lookahead_chunks - first
        hole = next((i for i in range(start, min(stop, len(present))) if not present[i] & bit), len(present))
        if hole >= stop:
            return boundary
        # Every boundary between the hole and here needs the hole too, so the first hole is the longest jump.
        boundary = first + hole - group.lookahead_chunks
    return first


def _run(present: Sequence[int], mask: int) -> int:
    """Return how many chunks from the first on have all bits of `mask`."""
    if all(bits & mask == mask for bits in set(present)):  # the common case, at the speed of C
        return len(present)
    return next(i for i, bits in enumerate(present) if bits & mask != mask)
