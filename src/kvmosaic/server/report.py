"""The status report: one JSON object that `kvmosaic status`, HTTP and the metrics all read.

Made on the loop's thread out of the registry and the cache; nobody changes it afterwards.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kvmosaic.cache.cache import Cache
from kvmosaic.cache.values import NamespaceStats
from kvmosaic.memory.extents import ExtentPool
from kvmosaic.server.engines import Engine, Registry

Report = dict[str, Any]  # Any: a JSON object for people and scripts, not read by our own code


def build_report(engines: Registry, cache: Cache, pool: ExtentPool) -> Report:
    """What is held, by whom, at one moment."""
    stats = cache.stats()
    return {
        "objects": stats.objects,
        "object_bytes": stats.object_bytes,
        "used_bytes": pool.used_bytes,
        "usable_bytes": pool.usable_bytes,
        "capacity_bytes": pool.capacity_bytes,
        "leases": stats.leases,
        "leased_bytes": stats.leased_bytes,
        "reservations": stats.reservations,
        "reserved_bytes": stats.reserved_bytes,
        "sessions": sum(len(engine.sessions) for engine in engines),
        "quarantined": sum(engine.quarantined for engine in engines),
        "counters": dataclasses.asdict(stats.counters),
        "engines": [_engine(engine) for engine in engines],
        "models": [_model(one) for one in stats.namespaces],
    }


def _engine(engine: Engine) -> Report:
    geometry = engine.geometry
    return {
        "engine": engine.key,
        "model": geometry.model if geometry else "",
        "namespace": geometry.namespace.hex() if geometry else "",
        "ranks": len(engine.declared_ranks()),
        "world": engine.world,
        "epoch": engine.epoch,
        "ready": engine.ready,
        "refusal": engine.refusal,
        "quarantined": engine.quarantined,
        "pids": sorted({session.process.pid for session in engine.sessions}),
    }


def _model(stats: NamespaceStats) -> Report:
    geometry = stats.geometry
    return {
        "model": geometry.model,
        "namespace": stats.namespace.hex(),
        "generation": stats.generation,
        "chunk_tokens": geometry.chunk_tokens,
        "groups": [
            {
                "kind": str(group.kind),
                "block_tokens": group.block_tokens,
                "memory_tokens": group.memory_tokens,
                "draft": group.draft,
                "cacheable": group.cacheable,
            }
            for group in geometry.groups
        ],
        "object_groups": [
            {
                "kind": str(group.kind),
                "reach_chunks": group.reach_chunks,
                "object_bytes": group.object_bytes,
                "objects": stats.objects[index],
                "bytes": stats.object_bytes[index],
            }
            for index, group in enumerate(geometry.object_groups)
        ],
        "objects": sum(stats.objects),
        "bytes": sum(stats.object_bytes),
        "lookups": stats.lookups,
        "hits": stats.hits,
        "hit_chunks": stats.hit_chunks,
        "leases": stats.leases,
        "reservations": stats.reservations,
    }
