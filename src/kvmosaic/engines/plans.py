"""Copy plans: what the scheduler half decides and the worker half carries out. Values only.

A plan travels from the engine's scheduler to every rank, so it is the same for all of them: each rank finds its own
bytes by its own page map and by the offsets in the geometry.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvmosaic.core.types import BootId, ReservationId

BlockIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Objects of one object group and the engine blocks they are copied from or to.

    `extents` and `extent_counts` are packed as in protocol.messages, object after object. `block_ids[i]` has shape
    [num_objects, kept_blocks[i]] for the i-th group of the object group; block id 0 means: leave these bytes alone.
    """

    object_group: int
    num_objects: int
    extents: bytes
    extent_counts: bytes
    block_ids: tuple[BlockIds, ...]


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Engine pages to extents. `numbers[i]` are the objects' numbers in the reservation, for `copies[i]`."""

    boot_id: BootId
    epoch: int
    reservation: ReservationId
    num_objects: int
    copies: tuple[CopyPlan, ...]
    numbers: tuple[npt.NDArray[np.int64], ...]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Extents to engine pages, for one request."""

    boot_id: BootId
    epoch: int
    request: str
    copies: tuple[CopyPlan, ...]
