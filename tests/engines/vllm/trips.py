"""Chunks of a planned engine on their way: from blocks of every rank into an arena, and into other blocks.

Blocks of all groups are drawn from one pool, as vLLM does, and every byte of every rank is random, replicas included.
What must be where afterwards is computed by tests.engines.vllm.rawpages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_cache_interface import iter_layer_specs

from kvmosaic.engines.copying import Copier
from kvmosaic.engines.plans import CopyPlan
from kvmosaic.layout.groups import Geometry
from kvmosaic.layout.objects import compose
from tests.engines.memory import Store, object_addresses, plan_of
from tests.engines.vllm.planning import Plan, register_all
from tests.engines.vllm.rawpages import layers_of, page_pieces, storage_of

Ids = npt.NDArray[np.int64]


def never() -> bool:
    return False


class Trip:
    """Some chunks of every object group. `store()`, then `load()`, then `check()`."""

    def __init__(self, plan: Plan, num_chunks: int, separate: bool = True) -> None:
        self.plan = plan
        self.registrations = register_all(plan)
        self.geometry = compose([each.declaration for each in self.registrations], None, separate)
        self._rng = np.random.default_rng(0)
        self.storages = [storage_of(kv_caches) for kv_caches in plan.kv_caches]
        for storage in self.storages:
            storage[:] = np.frombuffer(self._rng.bytes(len(storage)), dtype=np.uint8)
        self.before = [storage.copy() for storage in self.storages]
        object_groups = self.geometry.object_groups
        num_bytes = sum(objects.object_bytes for objects in object_groups) * num_chunks
        self.arena = Store(num_bytes + 4096 * num_chunks * len(object_groups), self._rng)
        self.extents = [
            [self.arena.place(objects.object_bytes, pieces=3) for _ in range(num_chunks)] for objects in object_groups
        ]
        pool = self._rng.permutation(np.arange(1, plan.scheduler.num_blocks))
        self.source = self._draw(pool, num_chunks)
        self.target = self._draw(pool[sum(ids.size for ids in self.source.values()) :], num_chunks)

    def _draw(self, pool: Ids, num_chunks: int) -> dict[int, Ids]:
        """Blocks of every group that is stored, of shape [num_chunks, kept]; no id twice."""
        drawn, at = {}, 0
        for objects in self.geometry.object_groups:
            for group, kept in zip(objects.groups, objects.kept_blocks, strict=True):
                drawn[group] = pool[at : at + num_chunks * kept].reshape(num_chunks, kept)
                at += num_chunks * kept
        assert at <= len(pool), "the case has too few blocks"
        return drawn

    def copiers(self, geometry: Geometry | None = None) -> list[Copier]:
        arena = self.arena.bytes
        return [
            Copier(geometry or self.geometry, rank, each.pages, arena.ctypes.data, len(arena))
            for rank, each in enumerate(self.registrations)
        ]

    def plans(self, blocks: dict[int, Ids]) -> list[CopyPlan]:
        return [
            plan_of(number, self.extents[number], [blocks[group] for group in objects.groups])
            for number, objects in enumerate(self.geometry.object_groups)
        ]

    def store(self) -> None:
        """Every rank stores; nothing but the objects' own bytes of the arena may change."""
        ours = np.zeros(len(self.arena.bytes), dtype=np.bool_)
        for objects, extents in zip(self.geometry.object_groups, self.extents, strict=True):
            for pieces in extents:
                ours[object_addresses(pieces, objects.object_bytes)] = True
        guard = self.arena.bytes[~ours].copy()
        for copier in self.copiers():
            for plan in self.plans(self.source):
                assert copier.store(plan, never).all()
        assert (self.arena.bytes[~ours] == guard).all(), "bytes of the arena that belong to no object"
        for storage, before in zip(self.storages, self.before, strict=True):
            assert (storage == before).all(), "a store wrote into the engine's memory"

    def load(self, copiers: Sequence[Copier] | None = None) -> None:
        for copier in copiers or self.copiers():
            for plan in self.plans(self.target):
                assert copier.load(plan, never)

    def check(self) -> int:
        """Every byte of every rank, of pages, padding and other blocks alike; how many bytes must have moved."""
        num_moved = 0
        for rank, storage in enumerate(self.storages):
            want = self.before[rank].copy()
            for group, ids in self.target.items():
                stored_by = rank - rank % self._replicas(group, rank)
                for target, source in zip(ids.ravel().tolist(), self.source[group].ravel().tolist(), strict=True):
                    num_moved += self._move(group, rank, (target, want), (source, self.before[stored_by]))
            assert (storage == want).all(), f"rank {rank} has wrong bytes"
        return num_moved

    def reset(self) -> None:
        for storage, before in zip(self.storages, self.before, strict=True):
            storage[:] = before

    def flip_a_byte(self, objects: int) -> Callable[[], None]:
        """Spoil one random byte of an object group's first object; returns how to undo it."""
        where = object_addresses(self.extents[objects][0], self.geometry.object_groups[objects].object_bytes)
        byte = int(self._rng.choice(where))
        self.arena.bytes[byte] ^= 0xFF

        def undo() -> None:
            self.arena.bytes[byte] ^= 0xFF

        return undo

    def _move(
        self, group: int, rank: int, to: tuple[int, npt.NDArray[np.uint8]], from_: tuple[int, npt.NDArray[np.uint8]]
    ) -> int:
        config, num_bytes = self.plan.workers[rank], 0
        for layer in layers_of(config, group):
            pieces = zip(
                page_pieces(config, layer, group, to[0]), page_pieces(config, layer, group, from_[0]), strict=True
            )
            for target, source in pieces:
                to[1][target] = from_[1][source]
                num_bytes += target.stop - target.start
        return num_bytes

    def _replicas(self, group: int, rank: int) -> int:
        """How many ranks in a row hold the same bytes: each of `max_tp_shards` shards is on several."""
        tp = self.plan.vllm_config.parallel_config.tensor_parallel_size
        spec = self.plan.workers[rank].kv_cache_groups[group].kv_cache_spec
        shards = [getattr(each, "max_tp_shards", None) or tp for each in iter_layer_specs(spec)]
        return math.gcd(*[max(1, tp // count) for count in shards])
