"""The scheduler half: matches prefixes, plans copies, commits what the workers report. Touches no tensor.

Owns what is known of each request and the reports still owed; the client owns the connection and its deadlines.
Called by the connector only, on the engine's scheduler thread.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from kvmosaic.client import Attachment, SchedulerClient, SchedulerSession
from kvmosaic.core.types import BootId, Kind, ReservationId
from kvmosaic.engines.plans import LoadPlan, StorePlan
from kvmosaic.engines.tables import Tables
from kvmosaic.engines.transfers import STORE_BYTES_PER_STEP
from kvmosaic.engines.vllm.adapters import Adapters
from kvmosaic.engines.vllm.banner import describe, has_state
from kvmosaic.engines.vllm.loads import failing_load, plan_load
from kvmosaic.engines.vllm.plans import ConnectorMeta, WorkerReport, join_reports
from kvmosaic.engines.vllm.stores import Candidate, find_candidate, plan_store
from kvmosaic.engines.vllm.tracking import Answer, RequestState
from kvmosaic.engines.vllm.translate import check_geometry
from kvmosaic.errors import Refused
from kvmosaic.layout.groups import Geometry
from kvmosaic.protocol.messages import Hit

logger = logging.getLogger(__name__)

MAX_OBJECTS_PER_STEP = 1024

STUCK_STEPS = 3
"""So many steps an idle engine may leave a hit; with two steps in flight one may be about to free blocks."""

OWED_DEADLINE_S = 30.0
"""How long an idle engine keeps stepping for a rank's report; a later report still counts."""


@dataclass(slots=True)
class Owed:
    """A reservation whose ranks have not all reported yet."""

    boot_id: BootId
    num_objects: int
    since_s: float
    report: tuple[int, bytes] | None = None


class SchedulerHalf:
    """One per engine; see the module."""

    def __init__(
        self,
        client: SchedulerClient,
        session: SchedulerSession,
        vllm_config: Any,  # Any: vLLM's classes are not typed here
        kv_cache_config: Any,
    ) -> None:
        self._client = client
        self._session = session
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        speculative = vllm_config.speculative_config
        self._num_drafts = speculative.num_speculative_tokens if speculative else 0
        self._attachment: Attachment | None = None
        self._step_open = False
        self._known_geometry: Geometry | None = None
        self._foreign = False
        self._adapters = Adapters()
        self._requests: dict[str, RequestState] = {}
        self._loads: dict[str, LoadPlan] = {}
        self._in_flight: dict[str, RequestState] = {}
        self._owed: dict[ReservationId, Owed] = {}
        self._offers: dict[str, RequestState] = {}
        self._num_stuck_steps = 0

    def greet(self) -> None:
        """At the start of the engine: say what can hit, if the server is there already."""
        attachment = self._session.attachment
        if attachment is not None:
            self._check_geometry(attachment.geometry)

    # Requests

    def add(self, request: Any) -> None:
        """A request enters the engine."""
        self._state(request)

    def finish(self, request_id: str) -> None:
        """A request leaves the engine; a load in flight keeps its lease until the workers report."""
        state = self._requests.pop(request_id, None)
        self._offers.pop(request_id, None)
        if state is not None and request_id not in self._in_flight:
            self._release(state)

    # Loads

    def match(self, request: Any, own_tokens: int) -> int:
        """How many tokens beyond the engine's own hit can be loaded. Asked on every scheduling attempt."""
        state = self._state(request)
        state.readmit(own_tokens)
        geometry = self._begin_step()
        if geometry is None or state.no_load or not state.served or request.skip_reading_prefix_cache:
            return 0
        self._adopt(state, geometry)
        first = own_tokens // geometry.chunk_tokens
        last = (request.num_tokens - 1) // geometry.chunk_tokens
        if last <= first:
            return 0
        if state.answer is None or first < state.answer.first_chunk:
            state.answer = self._ask(state, geometry, first, last)
        if state.answer is None:
            return 0
        self._hint_junction(state, state.answer, geometry, last)
        num_external = max(0, state.answer.boundary * geometry.chunk_tokens - own_tokens)
        if num_external:
            self._offers[request.request_id] = state
        return num_external

    def _ask(self, state: RequestState, geometry: Geometry, first: int, last: int) -> Answer | None:
        lookahead = max(objects.lookahead_chunks for objects in geometry.object_groups)
        end = min(last + lookahead, state.hashed_chunks())
        if end <= first:
            return None
        digests = state.digests[first:end]
        state.asked = True
        reply = self._client.lookup(state.request.request_id, first, len(digests[0]), b"".join(digests))
        if reply is None:
            return None
        if isinstance(reply, Hit):
            return Answer(first, reply.boundary, reply.full_chunks, reply)
        return Answer(first, first, reply.full_chunks, None)

    def _hint_junction(self, state: RequestState, answer: Answer, geometry: Geometry, last: int) -> None:
        """Have the engine end a step where the prompt leaves what the full object groups know.

        Without a state there the next prompt that shares this prefix would miss again.
        """
        request = state.request
        if not hasattr(request, "shared_prefix_boundary") or not has_state(geometry):
            return
        known = max(state.own_tokens, answer.boundary * geometry.chunk_tokens)
        junction = min(answer.full_chunks, last) * geometry.chunk_tokens
        if junction <= known and self._ends_steps_elsewhere(geometry):
            junction = last * geometry.chunk_tokens
        if junction > known:
            request.shared_prefix_boundary = max(request.shared_prefix_boundary, junction)

    def _ends_steps_elsewhere(self, geometry: Geometry) -> bool:
        """Whether the engine cuts prompts by another block size than its states have.

        vLLM on a CPU does, when it runs in a process of its own: it resets its block size after it has planned the
        cache, and then leaves no state at the last boundary of most prompts.
        """
        blocks = {group.block_tokens for group in geometry.groups if group.kind is Kind.STATE}
        return any(self._vllm_config.cache_config.block_size % block for block in blocks)

    def admit(self, request: Any, tables: Tables, num_external: int) -> None:
        """The engine allocated blocks. With external tokens their load is planned now, else the lease ends."""
        state = self._state(request)
        self._offers.pop(request.request_id, None)
        if num_external == 0:
            if request.request_id not in self._in_flight:
                self._release(state)
            return
        self._in_flight[request.request_id] = state
        self._loads[request.request_id] = failing_load(request.request_id)
        plan = self._plan_load(state, tables, num_external)
        if plan is None:
            logger.warning("request %s: the load cannot cover all blocks; it is recomputed", request.request_id)
            return
        self._loads[request.request_id] = plan

    def _plan_load(self, state: RequestState, tables: Tables, num_external: int) -> LoadPlan | None:
        attachment, geometry = self._attachment, state.geometry
        if attachment is None or geometry is None or state.answer is None or state.answer.hit is None:
            return None
        tokens = (state.own_tokens, state.own_tokens + num_external)
        copies = plan_load(geometry, state.answer.hit, tables, tokens)
        if copies is None:
            return None
        state.mark_planned(tokens[1] // geometry.chunk_tokens)
        return LoadPlan(attachment.boot_id, attachment.epoch, state.request.request_id, copies)

    # Steps

    def plan_step(self, output: Any) -> ConnectorMeta:
        """The step's plans, from vLLM's SchedulerOutput; ends the step for the time budget."""
        stores = self._plan_stores(output)
        self._withdraw_stuck_offers(output)
        loads, self._loads = tuple(self._loads.values()), {}
        self._step_open = False
        return ConnectorMeta(stores, loads, busy=output.total_num_scheduled_tokens > 0)

    def _withdraw_stuck_offers(self, output: Any) -> None:
        """vLLM admits a load only with more free blocks than it wants for computing: in a small pool a hit could
        keep a request waiting for ever. What is not taken while nothing runs and nothing loads is not offered again.
        """
        offers, self._offers = self._offers, {}
        stuck = offers and not output.total_num_scheduled_tokens and not self._in_flight
        self._num_stuck_steps = self._num_stuck_steps + 1 if stuck else 0
        if self._num_stuck_steps >= STUCK_STEPS:
            for state in offers.values():
                state.no_load = True
                self._release(state)

    def abandon_step(self, output: Any) -> ConnectorMeta:
        """After a fault: a step without stores. Loads that were not planned yet fail, so no request waits for ever."""
        loads, self._loads = tuple(self._loads.values()), {}
        self._step_open = False
        return ConnectorMeta(loads=loads)

    def _plan_stores(self, output: Any) -> tuple[StorePlan, ...]:
        geometry = self._begin_step() if output.num_scheduled_tokens else None
        candidates = self._candidates(output, geometry) if geometry is not None else []
        if geometry is None or self._attachment is None or not candidates:
            return ()
        reserved = self._client.reserve([candidate.chain() for _, candidate in candidates])
        if reserved is None:
            return ()
        for state, candidate in candidates:
            state.mark_planned(candidate.end)
        boot = (self._attachment.boot_id, self._attachment.epoch)
        plan = plan_store(geometry, [candidate for _, candidate in candidates], reserved, boot)
        if plan is None:
            return ()
        self._owed[plan.reservation] = Owed(plan.boot_id, plan.num_objects, time.monotonic())
        return (plan,)

    def _candidates(self, output: Any, geometry: Geometry) -> list[tuple[RequestState, Candidate]]:
        blocks = output.kv_connector_block_state
        found = []
        room = max_chunks_per_step(geometry)
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is None or not state.served:
                continue
            self._adopt(state, geometry)
            start = state.request.num_computed_tokens
            end = start + num_scheduled
            if not self._num_drafts:
                state.note_step(start, end)
            num_drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            frontier = state.frontier_chunks(end, num_drafts, self._num_drafts)
            frontier = min(frontier, state.planned + room)
            if state.trusted and state.planned < frontier:
                room -= frontier - state.planned
                hand_overs = blocks.boundary_state_offloads.get(request_id, ())
                candidate = find_candidate(
                    geometry,
                    (state.planned, frontier),
                    state.digests,
                    blocks.get_block_ids(request_id),
                    (state.step_ends, hand_overs),
                )
                found.append((state, candidate))
        return found

    # Reports

    def take_reports(self, output: Any) -> None:
        """What the workers say in vLLM's KVConnectorOutput: ended loads, written objects."""
        for request_id in output.finished_recving or ():
            state = self._in_flight.pop(request_id, None)
            if state is not None:
                state.no_load |= request_id in (output.failed_recving or ())
                self._release(state)
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            for reservation, of_ranks in report.stored.items():
                self._take_stored(reservation, of_ranks)

    def _take_stored(self, reservation: ReservationId, of_ranks: tuple[int, bytes]) -> None:
        owed = self._owed.get(reservation)
        if owed is None:
            return
        owed.report = join_reports(owed.report, of_ranks)
        num_ranks, written = owed.report
        if num_ranks >= self._vllm_config.parallel_config.world_size:
            del self._owed[reservation]
            self._client.commit(owed.boot_id, reservation, written)

    def owes(self) -> bool:
        """Whether an idle engine should go on stepping because a rank still owes a report."""
        if not self._owed:
            return False
        limit_s = time.monotonic() - OWED_DEADLINE_S
        return any(owed.since_s > limit_s for owed in self._owed.values())

    def clear(self) -> None:
        """Share nothing with what was stored before: the engine's weights may be about to change."""
        for state in self._requests.values():
            state.distrust()
        self._client.clear()

    def close(self) -> None:
        """End the session; the server forgets the engine when its workers have gone too."""
        self._session.close()

    # Helpers

    def _state(self, request: Any) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            adapter = self._adapters.fingerprint(request.lora_request)
            state = self._requests[request.request_id] = RequestState(request, adapter or b"")
            state.served = adapter is not None
        return state

    def _adopt(self, state: RequestState, geometry: Geometry) -> None:
        assert self._attachment is not None
        state.adopt((self._attachment.boot_id, self._attachment.epoch), geometry)

    def _release(self, state: RequestState) -> None:
        if state.asked:
            self._client.release(state.request.request_id)
            state.asked = False
            state.answer = None

    def _begin_step(self) -> Geometry | None:
        """The geometry to serve this step by; None when there is no server or it must not be used."""
        if not self._step_open:
            self._step_open = True
            self._attachment = self._client.begin_step()
        if self._attachment is None:
            return None
        self._check_geometry(self._attachment.geometry)
        return None if self._foreign else self._attachment.geometry

    def _check_geometry(self, geometry: Geometry) -> None:
        if geometry == self._known_geometry:
            return
        self._known_geometry = geometry
        self._foreign = False
        try:
            check_geometry(geometry, self._vllm_config, self._kv_cache_config)
        except Refused as error:
            self._foreign = True
            logger.error("kvmosaic is not used: %s", error)
        else:
            logger.info("%s", describe(geometry, self._vllm_config))


def max_chunks_per_step(geometry: Geometry) -> int:
    """How many chunks one step may ask room for: what the server answers in a few ms, and the workers copy at once.

    The rest is asked for in the next steps. Without a limit a restarted server would get everything that runs in one
    request, too large to be answered within any step's patience.
    """
    chunk_bytes = sum(objects.object_bytes for objects in geometry.object_groups) // geometry.world
    by_objects = MAX_OBJECTS_PER_STEP // len(geometry.object_groups)
    return max(1, min(by_objects, STORE_BYTES_PER_STEP // max(1, chunk_bytes)))
