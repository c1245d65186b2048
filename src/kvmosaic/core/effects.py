"""What the cache did that the world outside may want to know. Values only.

The cache appends effects while it carries out a verb; the server drains them after each one: tiers and
KV events will read them there.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmosaic.core.types import Digest, Extents, Namespace


@dataclass(frozen=True, slots=True)
class Stored:
    """An object became visible. `extents` are valid until the same object's `Evicted`."""

    namespace: Namespace
    digest: Digest
    object_group: int
    num_bytes: int
    extents: Extents


@dataclass(frozen=True, slots=True)
class Evicted:
    """An object can be found no more; a reader with a lease may still hold its bytes."""

    namespace: Namespace
    digest: Digest
    object_group: int
    num_bytes: int


Effect = Stored | Evicted
