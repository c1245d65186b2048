"""The worker half on real vLLM tensors against a real server: bytes through, reports once, faults survived."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvmosaic.client import Attachment, SchedulerClient, SchedulerSession
from kvmosaic.core.types import EXTENT, BootId, Outcome, ReservationId
from kvmosaic.engines.plans import BlockIds, CopyPlan, LoadPlan, StorePlan
from kvmosaic.engines.vllm.options import Options
from kvmosaic.engines.vllm.plans import ConnectorMeta, WorkerReport
from kvmosaic.engines.vllm.translate import check_geometry, engine_key
from kvmosaic.engines.vllm.worker import WorkerHalf
from kvmosaic.errors import Refused
from kvmosaic.layout.groups import ObjectGroup
from kvmosaic.protocol.messages import Chain, Hit
from kvmosaic.testing.serving import ServerProcess, wait_until
from tests.engines.vllm.planning import MODELS, Plan, plan_model

pytestmark = pytest.mark.slow

NUM_CHUNKS = 2
SHIFT = 40  # from the blocks that are stored to those that are loaded into
DIGESTS = b"".join(bytes([number]) * 32 for number in range(1, NUM_CHUNKS + 1))


class Engine:
    """All ranks of one engine in this process, and the client its scheduler half would use."""

    def __init__(self, plan: Plan, socket: Path) -> None:
        self.plan = plan
        self.workers = []
        for rank, (config, kv_caches) in enumerate(zip(plan.workers, plan.kv_caches, strict=True)):
            plan.vllm_config.parallel_config.rank = rank
            self.workers.append(WorkerHalf(Options(socket), plan.vllm_config, config))
            self.workers[-1].register_kv_caches(kv_caches)
        self.session = SchedulerSession(socket, engine_key(plan.vllm_config))
        self.session.start()
        self.client = SchedulerClient(self.session, budget_s=5.0)

    def attach(self, other_than: BootId | None = None) -> Attachment:
        wait_until(lambda: self.session.attachment and self.session.attachment.boot_id != other_than)
        attachment = self.client.begin_step()
        assert attachment is not None
        return attachment

    def block_ids(self, objects: ObjectGroup, start: int) -> tuple[BlockIds, ...]:
        return tuple(
            start + np.arange(NUM_CHUNKS * kept, dtype=np.int64).reshape(NUM_CHUNKS, kept)
            for kept in objects.kept_blocks
        )

    def plan_store(self, start: int) -> StorePlan:
        """Every object of NUM_CHUNKS chunks, from blocks `start`, …"""
        attachment = self.attach()
        object_groups = attachment.geometry.object_groups
        wanted = np.full(NUM_CHUNKS, (1 << len(object_groups)) - 1, dtype="<u4").tobytes()
        reserved = self.client.reserve([Chain(0, b"", 32, DIGESTS, wanted)])
        assert reserved is not None
        assert set(reserved.outcomes) == {Outcome.GRANTED}
        counts = np.frombuffer(reserved.extent_counts, dtype="<u4")
        ends = np.concatenate(([0], np.cumsum(counts.astype(np.int64)))) * EXTENT.size
        copies, numbers = [], []
        for group, objects in enumerate(object_groups):
            mine = np.arange(NUM_CHUNKS, dtype=np.int64) * len(object_groups) + group
            extents = b"".join(reserved.extents[ends[number] : ends[number + 1]] for number in mine)
            copies.append(CopyPlan(group, NUM_CHUNKS, extents, counts[mine].tobytes(), self.block_ids(objects, start)))
            numbers.append(mine)
        reservation = ReservationId(reserved.reservation)
        return StorePlan(attachment.boot_id, attachment.epoch, reservation, len(counts), tuple(copies), tuple(numbers))

    def plan_load(self, start: int, request: str = "r") -> LoadPlan:
        """A hit of NUM_CHUNKS chunks into blocks `start`, …; a window's earlier chunks are not loaded."""
        attachment = self.attach()
        digests = DIGESTS + bytes(32) * max(each.lookahead_chunks for each in attachment.geometry.object_groups)
        hit = self.client.lookup(request, 0, 32, digests)
        assert isinstance(hit, Hit)
        assert hit.boundary == NUM_CHUNKS
        copies = []
        for group, objects in enumerate(attachment.geometry.object_groups):
            first = hit.first_chunks[group]
            ids = tuple(each[first:] for each in self.block_ids(objects, start))
            copies.append(CopyPlan(group, NUM_CHUNKS - first, hit.extents[group], hit.extent_counts[group], ids))
        return LoadPlan(attachment.boot_id, attachment.epoch, request, tuple(copies))

    def store(self, plan: StorePlan) -> bytes:
        """One step of every rank with this store; the joined report, which is committed."""
        report = WorkerReport()
        for worker in self.workers:
            worker.wait_for_save(ConnectorMeta(stores=(plan,)))
            mine = worker.build_connector_worker_meta()
            assert mine is not None
            report = report.aggregate(mine)
            assert worker.build_connector_worker_meta() is None
        ranks, written = report.stored[plan.reservation]
        assert ranks == len(self.workers)
        self.client.commit(plan.boot_id, plan.reservation, written)
        return written

    def load(self, plan: LoadPlan, busy: bool) -> set[str]:
        """Steps of every rank until the load has ended; the requests that failed."""
        failed: set[str] = set()
        for worker in self.workers:
            worker.start_load_kv(ConnectorMeta(loads=(plan,), busy=busy))
            failed |= ended(worker, plan.request)
        return failed

    def close(self) -> None:
        for worker in self.workers:
            worker.check()
            worker.close()
        self.session.close()


def ended(worker: WorkerHalf, request: str) -> set[str]:
    """Steps without work until the request is reported; the failed ones."""
    reported: list[Any] = []

    def step() -> bool:
        worker.wait_for_save(ConnectorMeta())
        results = worker.get_transfer_results()
        assert worker.build_connector_worker_meta() is None
        if results.finished_recving:
            reported.append(results)
        return bool(reported)

    wait_until(step)
    assert reported[0].finished_recving == {request}
    assert not worker.get_transfer_results().finished_recving, "only once"
    return set(reported[0].failed_recving)


def fill(plan: Plan) -> None:
    """Every byte of every rank's cache random; ranks that hold replicas hold the same."""
    for kv_caches in plan.kv_caches:
        raw(kv_caches).copy_(torch.from_numpy(np.random.default_rng(5).integers(0, 256, len(raw(kv_caches)), np.uint8)))


def raw(kv_caches: dict[str, torch.Tensor]) -> torch.Tensor:
    storage = next(iter(kv_caches.values())).untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def pages(engine: Engine, load: LoadPlan) -> list[bytes]:
    """The pages of the blocks that a load writes, read through vLLM's views."""
    geometry = engine.attach().geometry
    found = []
    for copies in load.copies:
        objects = geometry.object_groups[copies.object_group]
        for group, ids in zip(objects.groups, copies.block_ids, strict=True):
            for config, kv_caches in zip(engine.plan.workers, engine.plan.kv_caches, strict=True):
                layers = [name for tensor in config.kv_cache_tensors for name in tensor.layers]
                found += [
                    kv_caches[layer][block].contiguous().view(torch.uint8).numpy().tobytes()
                    for layer in config.kv_cache_groups[group].layer_names
                    for block in ids.ravel().tolist()
                    if layer in layers
                ]
    return found


Start = Callable[[str], Engine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Engine] = []

    def build(name: str) -> Engine:
        model = MODELS[name]
        plan = plan_model(replace(model, num_blocks=max(2 * SHIFT, model.num_blocks)), tmp_path / "model")
        started.append(Engine(plan, tmp_path / "server.sock"))
        return started[-1]

    yield build
    for engine in started:
        engine.close()


@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize(
    "name", ["Llama", "Gemma 4", "Qwen3-Next on two ranks", "DSA on two ranks", "DeepSeek-V4", "Kimi on two ranks"]
)
def test_pages_come_back_from_the_server_bit_by_bit(server: ServerProcess, start: Start, name: str, busy: bool) -> None:
    engine = start(name)
    check_geometry(engine.attach().geometry, engine.plan.vllm_config, engine.plan.scheduler)
    fill(engine.plan)
    assert set(engine.store(engine.plan_store(1))) == {1}
    load = engine.plan_load(1 + SHIFT)
    source = replace(load, copies=tuple(moved(copies, -SHIFT) for copies in load.copies))
    assert pages(engine, load) != pages(engine, source)
    assert engine.load(load, busy) == set()
    assert pages(engine, load) == pages(engine, source)


def moved(copies: CopyPlan, by: int) -> CopyPlan:
    return replace(copies, block_ids=tuple(ids + by for ids in copies.block_ids))


def test_another_engine_of_the_same_model_loads_what_the_first_stored(server: ServerProcess, start: Start) -> None:
    first, second = start("Gemma 3"), start("Gemma 3")
    fill(first.plan)
    first.store(first.plan_store(1))
    for kv_caches in second.plan.kv_caches:
        raw(kv_caches).zero_()
    load = second.plan_load(1)
    assert pages(second, load) != pages(first, load)
    assert second.load(load, busy=True) == set()
    assert pages(second, load) == pages(first, load)


def test_loads_of_a_lost_server_fail_and_the_next_server_is_used(server: ServerProcess, start: Start) -> None:
    engine = start("Llama")
    fill(engine.plan)
    stale_store = engine.plan_store(1)
    engine.store(stale_store)
    stale = engine.plan_load(1 + SHIFT)
    server.kill()
    wait_until(lambda: all(worker._attachment() is None for worker in engine.workers))
    before = [raw(kv_caches).clone() for kv_caches in engine.plan.kv_caches]
    assert engine.load(stale, busy=True) == {"r"}
    assert all((raw(now) == then).all() for now, then in zip(engine.plan.kv_caches, before, strict=True))
    server.restart()
    began_s = time.monotonic()
    new_boot = engine.attach(other_than=stale.boot_id).boot_id
    assert time.monotonic() - began_s < 2.0
    assert engine.load(stale, busy=False) == {"r"}, "its plan is of another boot"
    for worker in engine.workers:
        worker.wait_for_save(ConnectorMeta(stores=(stale_store,)))
        report = worker.build_connector_worker_meta()
        assert report is not None
        assert set(report.stored[stale_store.reservation][1]) == {0}
    engine.store(engine.plan_store(1))
    load = engine.plan_load(1 + SHIFT)
    assert load.boot_id == new_boot
    assert engine.load(load, busy=True) == set()


def test_sleeping_pages_are_neither_read_nor_written(server: ServerProcess, start: Start) -> None:
    engine = start("Llama")
    fill(engine.plan)
    engine.store(engine.plan_store(1))
    load = engine.plan_load(1 + SHIFT)
    for worker in engine.workers:
        worker.unregister_kv_caches()
        worker.unregister_kv_caches()
    before = [raw(kv_caches).clone() for kv_caches in engine.plan.kv_caches]
    assert engine.load(load, busy=True) == {"r"}
    assert all((raw(now) == then).all() for now, then in zip(engine.plan.kv_caches, before, strict=True))
    for worker in engine.workers:
        worker.restore_kv_caches()
    assert engine.load(load, busy=True) == set()


def test_a_worker_that_registers_again_is_served_again(server: ServerProcess, start: Start) -> None:
    engine = start("Llama")
    boot, epoch = engine.attach().boot_id, engine.attach().epoch
    engine.workers[0].register_kv_caches(engine.plan.kv_caches[0])
    # The scheduler learns it from the next answer.
    wait_until(lambda: engine.client.begin_step() and engine.client.lookup("x", 0, 32, DIGESTS))
    assert engine.attach().boot_id == boot
    assert engine.attach().epoch > epoch
    fill(engine.plan)
    assert set(engine.store(engine.plan_store(1))) == {1}


def test_without_a_server_every_plan_fails_and_nothing_waits(start: Start, tmp_path: Path) -> None:
    engine = start("Llama")
    plan = LoadPlan(BootId("none"), 0, "r", ())
    assert engine.load(plan, busy=True) == {"r"}
    assert engine.load(plan, busy=False) == {"r"}


def test_an_engine_that_is_not_served_is_told_at_registration(tmp_path: Path) -> None:
    plan = plan_model(MODELS["Llama"], tmp_path / "model")
    worker = WorkerHalf(Options(tmp_path / "server.sock"), plan.vllm_config, plan.workers[0])
    plan.workers[0].kv_cache_groups[0].host_resident = True
    with pytest.raises(Refused, match="host pool"):
        worker.register_kv_caches(plan.kv_caches[0])
    worker.close()
