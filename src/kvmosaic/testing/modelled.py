"""vLLM's real Scheduler with our connector in both roles, over a real server, and a modelled runner.

    step()   schedule -> (execute) -> update         one step at a time
             schedule, schedule -> execute -> update  asynchronous: two steps in flight

Free blocks hold poison from the moment they are free. Owns one engine; everything runs on the caller's thread, apart
from the threads of the connector. Reports of ranks are joined by vLLM's own aggregator.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvmosaic.testing.geometries import Geometry
from kvmosaic.testing.pages import POISON, Pages
from kvmosaic.testing.planned import Plan, Settings, allocate, plan_engine
from kvmosaic.testing.requests import Ask, make_request
from kvmosaic.testing.runner import Part, Runner
from kvmosaic.testing.sequences import Sequence

MAX_STEPS = 2000


@dataclass(slots=True)
class Step:
    """A step between schedule() and update_from_output()."""

    output: Any  # Any: vLLM's SchedulerOutput is not typed here
    parts: list[Part]
    freed: list[int]
    result: ModelRunnerOutput | None = None
    sampled: dict[str, list[int]] = field(default_factory=dict)


class ModelledEngine:
    """One engine. `step()` runs one engine step; `run()` until nothing is left to do. `salt` makes the bytes of an
    engine differ from those of other engines, as another model's would."""

    def __init__(
        self,
        folder: Path,
        geometry: Geometry,
        connector: dict[str, Any],
        settings: Settings | None = None,
        *,
        seed: int = 0,
        salt: str = "",
    ) -> None:
        self.geometry = geometry
        self.settings = settings or Settings()
        self.plan = plan_engine(folder, geometry, self.settings, connector)
        self.random = random.Random(seed)
        self.before_loads: Callable[[Any], None] = lambda meta: None
        """Called with the connector's metadata before the loads of a step start."""
        self.after_loads: Callable[[], None] = lambda: None
        """Called when they have started."""
        self.workers: list[Any] = []
        pages = [self._rank(rank, salt) for rank in range(geometry.ranks)]
        self.runner = Runner(pages, self._accept, exact_drafts=self.plan.hash_lookahead > 0)
        self.scheduler = self._start_scheduler(self.plan)
        self.connector = self.scheduler.connector
        self.sequences: dict[str, Sequence] = {}
        self.external: dict[str, int] = {}
        self.num_steps = 0
        self.num_preemptions = 0
        self._reports = KVOutputAggregator(geometry.ranks)
        self._in_flight: deque[Step] = deque()
        self._poisoned = set(range(self.plan.scheduler.num_blocks))
        self._freed: set[int] = set()

    def _rank(self, rank: int, salt: str) -> Pages:
        config = self.plan.workers[rank]
        tensors = allocate(config)
        storage = next(iter(tensors.values())).untyped_storage()
        pages = Pages(config, torch.empty(0, dtype=torch.uint8).set_(storage).numpy(), str(rank), salt)
        worker = KVConnectorFactory.create_connector(
            config=self.plan.configs[rank], role=KVConnectorRole.WORKER, kv_cache_config=config
        )
        worker.register_kv_caches(tensors)
        self.workers.append(worker)
        return pages

    def _start_scheduler(self, plan: Plan) -> Any:
        config = plan.configs[0]
        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        lookahead = [plan.hash_lookahead] if plan.hash_lookahead else []
        self._hasher = get_request_block_hasher(plan.hash_block, hash_fn, *lookahead)
        kind = AsyncScheduler if self.settings.asynchronous else Scheduler
        return kind(
            vllm_config=config,
            kv_cache_config=plan.scheduler,
            structured_output_manager=StructuredOutputManager(config),
            block_size=plan.scheduler_block,
            hash_block_size=plan.hash_block,
            log_stats=True,
        )

    # Work

    def add(self, name: str, tokens: list[int], max_tokens: int = 1) -> Request:
        return self.ask(Ask(name, tuple(tokens), max_tokens))

    def ask(self, ask: Ask) -> Request:
        """Let a request enter the engine."""
        self.sequences[ask.name] = ask.sequence()
        request = make_request(ask, self._hasher)
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self._poison_free_blocks()

    def run(self, limit: int = MAX_STEPS) -> None:
        for _ in range(limit):
            if not self.busy:
                return
            self.step()
        raise AssertionError("the engine does not come to rest")

    def serve(self, name: str, tokens: list[int], max_tokens: int = 1) -> int:
        """Run one request to its end; the number of tokens that came from outside."""
        self.add(name, tokens, max_tokens)
        self.run()
        return self.external.get(name, 0)

    @property
    def busy(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_requests()

    def drop_own_cache(self) -> None:
        assert self.scheduler.reset_prefix_cache()
        self._poison_free_blocks()

    def wedged(self) -> list[str]:
        """Requests that hold blocks for one another while nothing runs: vLLM reserves too little for prompts whose
        window was loaded, and preempts only what runs. Empty while anything can go on."""
        scheduler = self.scheduler
        computing = any(step.output.total_num_scheduled_tokens for step in self._in_flight)
        if computing or scheduler.running or any(worker._worker.loads_in_progress for worker in self.workers):
            return []
        loading = scheduler.connector._scheduler._in_flight
        return [request.request_id for request in scheduler.kv_holding_waiting if request.request_id not in loading]

    def reweigh(self, salt: str) -> None:
        """New weights in place; every cache was cleared before."""
        for pages in self.runner.ranks:
            pages.reweigh(salt)

    def holds_waiting(self) -> bool:
        """Whether a request that does not run holds blocks: then vLLM cannot preempt everything."""
        running = {request.request_id for request in self.scheduler.running}
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        return any(manager.req_to_blocks.get(name) for manager in managers for name in self.sequences.keys() - running)

    def reset(self, running: bool, connector: bool) -> bool:
        """As the engine's core resets: `running` preempts everything first, `connector` clears the server too."""
        done = self.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=connector)
        self._poison_free_blocks()
        return bool(done)

    def evict(self, choose: Callable[[list[Any]], list[Any]]) -> int:
        """Drop some of the cached blocks that nobody uses from the engine's own cache; how many."""
        pool = self.scheduler.kv_cache_manager.block_pool
        cached = [block for block in pool.blocks[1:] if block.ref_cnt == 0 and block.block_hash is not None]
        chosen = choose(cached)
        pool.evict_blocks({block.block_id for block in chosen})
        self._poison_free_blocks()
        return len(chosen)

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.connector.shutdown()

    # Steps

    def step(self) -> None:
        """One turn of the engine's core."""
        depth = 2 if self.settings.asynchronous else 1
        if self.scheduler.has_requests():
            step = self._schedule()
            self._in_flight.append(step)
            computes = step.output.total_num_scheduled_tokens > 0
            if len(self._in_flight) < depth and (computes or self.scheduler.has_requests()):
                if self.random.random() < 0.5:
                    self._execute_up_to(step)
                return
        if self._in_flight:
            self._retire()

    def drain(self) -> None:
        """End the steps in flight, as before a pause."""
        while self._in_flight:
            self._retire()

    def _schedule(self) -> Step:
        scheduler = self.scheduler
        waiting = {r.request_id for r in scheduler.requests.values() if r.num_computed_tokens == 0}
        preemptions = sum(r.num_preemptions for r in scheduler.requests.values())
        output = scheduler.schedule()
        self.num_steps += 1
        self.num_preemptions += sum(r.num_preemptions for r in scheduler.requests.values()) - preemptions
        for request_id in waiting & set(scheduler.requests):
            stats = scheduler.requests[request_id].prefill_stats
            if stats is not None and stats.num_external_cached_tokens:
                self.external[request_id] = stats.num_external_cached_tokens
        fresh = {new.req_id for new in output.scheduled_new_reqs} | set(output.scheduled_cached_reqs.resumed_req_ids)
        parts = [self._part(name, output, name in fresh) for name in output.num_scheduled_tokens]
        self._check_targets(output.kv_connector_metadata)
        self._poison_free_blocks()
        return Step(output, parts, self._take_freed())

    def _check_targets(self, meta: Any) -> None:
        """A load may only write blocks that one request holds and that nobody can find by their hash."""
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        for load in meta.loads:
            written = {int(block) for copy in load.copies for ids in copy.block_ids for block in ids.ravel()} - {0}
            shared = [b for b in sorted(written) if blocks[b].ref_cnt != 1 or blocks[b].block_hash is not None]
            assert not shared, f"{load.request}: its load writes to blocks {shared}, which others may read"

    def _part(self, name: str, output: Any, fresh: bool) -> Part:
        request = self.scheduler.requests[name]
        num_tokens = output.num_scheduled_tokens[name]
        start = request.num_computed_tokens - num_tokens
        replay = self.scheduler.prefix_replay_tokens if fresh and start and request.replay_start == start else 0
        return Part(
            name=name,
            truth=self.sequences[name],
            start=start,
            num_tokens=num_tokens,
            drafts=tuple(output.scheduled_spec_decode_tokens.get(name, ())),
            fresh=fresh,
            known=request.num_tokens,
            replay_end=start + replay if replay else 0,
            tables=self.scheduler.kv_cache_manager.get_block_ids(name),
        )

    def _execute_up_to(self, last: Step) -> None:
        for step in list(self._in_flight):
            if step.result is None:
                self._execute(step)
            if step is last:
                return

    def _retire(self) -> None:
        step = self._in_flight[0]
        if step.result is None:
            try:
                self._execute(step)
            except AssertionError:
                self._in_flight.remove(step)
                raise
        self._in_flight.popleft()
        assert step.result is not None
        self.scheduler.update_from_output(step.output, step.result)
        if self.settings.num_drafts and not self.settings.asynchronous:
            self._propose(step)
        self._poison_free_blocks()

    # The executor

    def _execute(self, step: Step) -> None:
        output = step.output
        self._poison(step.freed)
        self.runner.forget(output.finished_req_ids | (output.preempted_req_ids or set()))
        copies = [(pair.src_block_id, pair.dst_block_id) for pair in output.kv_cache_block_copies or ()]
        self.runner.prepare(output.new_block_ids_to_zero or (), copies)
        for worker in self.workers:
            worker.bind_connector_metadata(output.kv_connector_metadata)
        step.sampled = self.runner.forward(step.parts)
        self.before_loads(output.kv_connector_metadata)
        for worker in self.workers:
            worker.start_load_kv(None)
        self.after_loads()
        names = list(step.sampled)
        outputs = [
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[list(tokens) for tokens in step.sampled.values()],
                kv_connector_output=self._transfer(worker, output),
            )
            for worker in self.workers
        ]
        step.result = self._reports.aggregate(outputs)

    def _transfer(self, worker: Any, output: Any) -> KVConnectorOutput:
        if not self.settings.late_save:
            worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        report = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        if self.settings.late_save:
            worker.wait_for_save()
        worker.clear_connector_metadata()
        return report

    def _accept(self, name: str, proposed: int) -> int:
        return self.random.randint(0, proposed)

    def _propose(self, step: Step) -> None:
        """The drafts for the next step: some right, then wrong."""
        proposals = {}
        for name, tokens in step.sampled.items():
            request = self.scheduler.requests.get(name)
            if request is None or not tokens:
                continue
            right = self.random.randint(0, self.settings.num_drafts)
            drafts = self.sequences[name].tokens(request.num_tokens, request.num_tokens + self.settings.num_drafts)
            proposals[name] = [token if i < right else token + 1 for i, token in enumerate(drafts)]
        self.scheduler.update_draft_token_ids(DraftTokenIds(list(proposals), list(proposals.values())))

    def _poison_free_blocks(self) -> None:
        """What no table and no hash holds is nobody's: a copy that reads it late reads poison.

        A step that is still to be executed may read what was freed after it was scheduled, since whatever is
        written there is written by a later step. So such blocks are poisoned before the next one.
        """
        pool = self.scheduler.kv_cache_manager.block_pool
        free = {b.block_id for b in pool.blocks[1:] if b.ref_cnt == 0 and b.block_hash is None}
        self._freed |= free - self._poisoned
        self._poisoned = free
        if all(step.result is not None for step in self._in_flight):
            self._poison(self._take_freed())

    def _take_freed(self) -> list[int]:
        freed, self._freed = sorted(self._freed), set()
        return freed

    def _poison(self, blocks: list[int]) -> None:
        if blocks:
            for pages in self.runner.ranks:
                pages.fill(blocks, POISON)

    def check_rest(self) -> None:
        """Without requests every block is free, and nobody has written to the null block."""
        pool = self.scheduler.kv_cache_manager.block_pool
        assert not self.scheduler.requests, f"requests are left: {list(self.scheduler.requests)}"
        held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        assert held == 0, f"{held} blocks are held by nobody"
        assert all(pages.is_poison(0) for pages in self.runner.ranks), "the null block was written"
        for worker in self.workers:
            worker._worker.check()
