"""What the cache is asked and what it answers. Values only; the server translates them to and from messages."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from kvmosaic.core.types import EXTENT, Extents, Namespace, ReservationId
from kvmosaic.errors import RemoteProtocolError
from kvmosaic.layout.groups import Geometry


@dataclass(frozen=True, slots=True)
class Hit:
    """Chunks up to `boundary` are leased; the fields are those of protocol.messages.Hit."""

    boundary: int
    full_chunks: int
    first_chunks: tuple[int, ...]
    extents: tuple[bytes, ...]
    extent_counts: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Miss:
    """Nothing is leased. `full_chunks` is how deep the full object groups go all the same."""

    full_chunks: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Consecutive chunks to store; bit g of `wanted[i]` asks for the object of group g of the i-th."""

    first_chunk: int
    parent: bytes
    digests: Sequence[bytes]
    wanted: Sequence[int]


@dataclass(frozen=True, slots=True)
class Reservation:
    """The right to write `objects`, those of `outcomes` that were granted, in order. `id` is 0 when none was."""

    id: ReservationId
    outcomes: bytes
    objects: list[Extents]


@dataclass(slots=True)
class Counters:
    """What happened since the start; they only grow."""

    committed_objects: int = 0
    aborted_objects: int = 0
    evicted_objects: int = 0
    evicted_bytes: int = 0
    cleared_objects: int = 0
    no_room_objects: int = 0
    not_worth_it_objects: int = 0
    present_objects: int = 0
    capped_leases: int = 0
    late_commits: int = 0
    unknown_commits: int = 0


@dataclass(frozen=True, slots=True)
class NamespaceStats:
    """One namespace at one moment; `objects[g]` and `object_bytes[g]` are those of object group g."""

    namespace: Namespace
    geometry: Geometry
    generation: int
    objects: tuple[int, ...]
    object_bytes: tuple[int, ...]
    lookups: int
    hits: int
    hit_chunks: int
    leases: int
    reservations: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The whole cache at one moment."""

    namespaces: tuple[NamespaceStats, ...]
    leases: int
    leased_bytes: int
    reservations: int
    reserved_bytes: int
    counters: Counters

    @property
    def objects(self) -> int:
        return sum(sum(one.objects) for one in self.namespaces)

    @property
    def object_bytes(self) -> int:
        return sum(sum(one.object_bytes) for one in self.namespaces)


def pack_objects(objects: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Return the extents of several objects as they travel: all of them joined, and each one's number as u32."""
    packed = b"".join(objects)
    if len(packed) == EXTENT.size * len(objects):  # none has no extent, so each has one
        return packed, array("I", (1,)).tobytes() * len(objects)
    return packed, array("I", [len(extents) // EXTENT.size for extents in objects]).tobytes()


class PackedDigests(Sequence[bytes]):
    """Digests of equal length as they travel; each is cut out only when it is asked for."""

    def __init__(self, packed: bytes, digest_bytes: int) -> None:
        if digest_bytes < 1 or len(packed) % digest_bytes:
            raise RemoteProtocolError(f"{len(packed)} bytes are not digests of {digest_bytes} bytes")
        self._packed = packed
        self._digest_bytes = digest_bytes

    def __len__(self) -> int:
        return len(self._packed) // self._digest_bytes

    @overload
    def __getitem__(self, i: int) -> bytes: ...
    @overload
    def __getitem__(self, i: slice) -> list[bytes]: ...
    def __getitem__(self, i: int | slice) -> bytes | list[bytes]:
        size = self._digest_bytes
        if isinstance(i, slice):
            return [self._packed[at * size : (at + 1) * size] for at in range(*i.indices(len(self)))]
        at = range(len(self))[i] * size
        return self._packed[at : at + size]
