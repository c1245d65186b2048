"""The ids and small values every layer shares. Nothing here does I/O or keeps state."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum, StrEnum
from typing import NewType

Digest = NewType("Digest", bytes)
"""The engine's own block hash at the end of a chunk; it contains the whole prefix before it."""

Namespace = NewType("Namespace", bytes)
"""16-byte fingerprint of all that makes bytes comparable. Other namespace = miss."""

EngineKey = NewType("EngineKey", str)
"""Names one engine instance: all its ranks and its scheduler declare the same key."""

BootId = NewType("BootId", str)
"""Names one life of the server; every copy plan carries it."""

ReservationId = NewType("ReservationId", int)

Extents = NewType("Extents", bytes)
"""The pieces of the arena that hold one object, in order: packed little-endian (offset u64, length u64) pairs.

The last piece may be longer than what is left of the object.
"""

EXTENT = struct.Struct("<QQ")


def pack_extents(pieces: Iterable[tuple[int, int]]) -> Extents:
    """Pack (offset, length) byte ranges of the arena."""
    return Extents(b"".join(EXTENT.pack(offset, length) for offset, length in pieces))


def unpack_extents(extents: bytes) -> Iterator[tuple[int, int]]:
    """Yield the (offset, length) byte ranges of packed extents."""
    return EXTENT.iter_unpack(extents)


class Kind(StrEnum):
    """What a group remembers."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"


class Outcome(IntEnum):
    """What a reservation was answered for one object."""

    GRANTED = 0
    PRESENT = 1
    NOT_WORTH_IT = 2
    NO_ROOM = 3
