"""Which columns of a block table hold the bytes of which objects.

    tokens            first*C                        end*C
    chunk             [    first    ][     ...      ]
    full, bs = C/4    [ 0 | 1 | 2 | 3 ][ 4 | 5 | 6 | 7 ]     all columns kept
    window < C        [           2 3 ][           6 7 ]     only the trailing ones
    state, bs = C     [             0 ][             1 ]     the page at the chunk's end

Pure functions on arrays; used by the scheduler half for stores and loads alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvmosaic.engines.plans import BlockIds
from kvmosaic.layout.groups import Geometry, ObjectGroup

Tables = Sequence[Sequence[int]]


def kept_columns(geometry: Geometry, objects: ObjectGroup, position: int, first: int, end: int) -> BlockIds:
    """Columns of chunks [first, end) that group number `position` of the object group keeps.

    Shape [end - first, kept_blocks].
    """
    block_tokens = geometry.groups[objects.groups[position]].block_tokens
    blocks = geometry.chunk_tokens // block_tokens
    kept = objects.kept_blocks[position]
    chunk_ends = np.arange(first + 1, end + 1, dtype=np.int64) * blocks
    columns: BlockIds = chunk_ends[:, None] - np.arange(kept, 0, -1, dtype=np.int64)
    return columns


def ids_at(table: Sequence[int], columns: BlockIds) -> BlockIds:
    """Block ids at these columns; 0, the null block, beyond the end of the table."""
    end = int(columns.max()) + 1 if columns.size else 0
    ids = np.zeros(end, dtype=np.int64)
    known = np.asarray(table[:end], dtype=np.int64)
    ids[: len(known)] = known
    picked: BlockIds = ids[columns]
    return picked
