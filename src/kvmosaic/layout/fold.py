"""The fold rule: which boundary of a prompt can be served, given what is present. Pure functions.

A boundary L is servable iff each object group g has all chunks of `[max(first, L - reach_g), L + lookahead_g)`,
where the engine itself holds the chunks before `first`:

    chunk   0          first        L - reach       L         L + lookahead
            [  engine's  )[ not needed )[  needed    )[ must match )

Called by the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmosaic.layout.groups import ObjectGroup


def fold(present: Sequence[int], first: int, object_groups: Sequence[ObjectGroup], limit: int) -> tuple[int, int]:
    """Return the largest servable boundary in (first, limit], else `first`, and how deep the full groups go.

    Bit g of `present[i]` says that chunk `first + i` has its object of group g; chunks beyond are absent. The
    depth is a chunk index as well; it is `first` when there is no full group.
    """
    boundary = min(limit, first + len(present))
    runs = []
    partial = []
    for g, group in enumerate(object_groups):
        if group.reach_chunks is None:
            runs.append(first + _run(present, 1 << g))
            boundary = min(boundary, runs[-1] - group.lookahead_chunks)
        else:
            partial.append((1 << g, group))
    # Each of the others lowers the boundary to the largest one that it can serve, until all agree.
    agreed = False
    while not agreed and boundary > first:
        before = boundary
        for bit, group in partial:
            boundary = _lower(present, first, bit, group, boundary)
        agreed = boundary == before
    return max(boundary, first), min(runs, default=first)


def needs(group: ObjectGroup, first: int, boundary: int) -> int:
    """Return the first chunk that a load from `first` to `boundary` needs of this object group."""
    return first if group.reach_chunks is None else max(first, boundary - group.reach_chunks)


def _lower(present: Sequence[int], first: int, bit: int, group: ObjectGroup, boundary: int) -> int:
    """Return the largest boundary <= `boundary` that this group can serve, `first` when there is none."""
    while boundary > first:
        start = needs(group, first, boundary) - first
        stop = boundary + group.lookahead_chunks - first
        hole = next((i for i in range(start, min(stop, len(present))) if not present[i] & bit), len(present))
        if hole >= stop:
            return boundary
        # Every boundary between the hole and here needs the hole too, so the first hole is the longest jump.
        boundary = first + hole - group.lookahead_chunks
    return first


def _run(present: Sequence[int], bit: int) -> int:
    """Return how many chunks from the first on have this bit."""
    if all(bits & bit for bits in set(present)):  # the common case, at the speed of C
        return len(present)
    return next(i for i, bits in enumerate(present) if not bits & bit)
