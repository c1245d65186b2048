"""Which objects there are, who reads and writes them, and which go. Pure."""

from kvmosaic.cache.cache import Cache
from kvmosaic.cache.eviction import LRU, POLICIES, Policy
from kvmosaic.cache.values import (
    CacheStats,
    Chain,
    Counters,
    Hit,
    Miss,
    NamespaceStats,
    PackedDigests,
    Reservation,
    pack_objects,
)

__all__ = [
    "LRU",
    "POLICIES",
    "Cache",
    "CacheStats",
    "Chain",
    "Counters",
    "Hit",
    "Miss",
    "NamespaceStats",
    "PackedDigests",
    "Policy",
    "Reservation",
    "pack_objects",
]
