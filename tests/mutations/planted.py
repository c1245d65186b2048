"""Faults to plant in a fuzz run, each of them one that a cache like this one has had. Each must be caught.

`plant` patches this process; `server` names a fault of tests/mutations/serve.py. `geometries` and `tune` make the
schedules such that the fault matters; without it the same schedules pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import pytest

from kvmosaic.client import SchedulerClient
from kvmosaic.core.types import Kind
from kvmosaic.engines.copying import Copier, _Part
from kvmosaic.engines.transfers import Transfers
from kvmosaic.engines.vllm import identity, loads, scheduler, stores
from kvmosaic.engines.vllm.scheduler import SchedulerHalf
from kvmosaic.engines.vllm.tracking import RequestState
from kvmosaic.testing.geometries import GEOMETRIES
from kvmosaic.testing.sequences import next_token
from kvmosaic.testing.workload import Add, Break, Clear, Cut, Reset, Restart, Reweigh, Schedule, Slow, Turn

Patch = pytest.MonkeyPatch
Tune = Callable[[Schedule, Random], Schedule]
STATES = ("state", "two states", "state and window")
WINDOWS = ("window", "narrow window", "wide window", "two windows", "compressed")


def as_drawn(schedule: Schedule, random: Random) -> Schedule:
    return schedule


@dataclass(frozen=True)
class Fault:
    """`what` goes into the documentation."""

    what: str
    plant: Callable[[Patch], None] = lambda patch: None
    server: str = ""
    geometries: tuple[str, ...] = tuple(GEOMETRIES)
    tune: Tune = as_drawn


# What the schedules of a fault have in common


def between(*makers: Callable[[int, Random], Any]) -> Tune:
    """Strew events between the others."""

    def tune(schedule: Schedule, random: Random) -> Schedule:
        events: list[Any] = []
        for event in schedule.events:
            if isinstance(event, Turn) and random.random() < 0.6:
                events.append(random.choice(makers)(random.randrange(schedule.engines), random))
            events.append(event)
        return replace(schedule, events=tuple(events))

    return tune


def on(**settings: Any) -> Tune:
    return lambda schedule, random: replace(schedule, settings=replace(schedule.settings, **settings))


def both(first: Tune, second: Tune) -> Tune:
    return lambda schedule, random: second(first(schedule, random), random)


def little_room(schedule: Schedule, random: Random) -> Schedule:
    small = replace(schedule.settings, max_model_len=min(320, schedule.settings.max_model_len))
    events = tuple(e for e in schedule.events if not isinstance(e, Add) or len(e.ask.tokens) < 260)
    return replace(schedule, server="small chunks, little room", settings=small, events=events)


def two_engines(schedule: Schedule, random: Random) -> Schedule:
    events = tuple(replace(e, engine=random.randrange(2)) if isinstance(e, Add) else e for e in schedule.events)
    return replace(schedule, engines=2, stranger=False, events=events)


def strangers(schedule: Schedule, random: Random) -> Schedule:
    return replace(two_engines(schedule, random), stranger=True)


def answers(schedule: Schedule, random: Random) -> Schedule:
    """Prompts end near a boundary, and answers are long."""
    events = []
    for event in schedule.events:
        if isinstance(event, Add):
            event = replace(event, ask=replace(event.ask, max_tokens=max(20, event.ask.max_tokens)))
        events.append(event)
    return replace(schedule, events=tuple(events))


def restart_under_load(schedule: Schedule, random: Random) -> Schedule:
    """What one engine stored is on its way to another one when the server is replaced."""
    schedule = two_engines(schedule, random)
    events: list[Any] = []
    for ask in [event.ask for event in schedule.events if isinstance(event, Add)][:4]:
        again = replace(ask, name=f"{ask.name} again")
        events += [Add(0, ask), Turn(60), Add(1, again), Turn(1), Restart(0), Turn(20)]
    return replace(schedule, events=tuple(events))


SLOW = between(lambda engine, random: Slow(engine, random.randint(3, 10)))
PREEMPT = between(lambda engine, random: Reset(engine, True))


# Stores


def state_one_block_off(patch: Patch) -> None:
    find = stores.kept_columns

    def columns(geometry, objects, position, first, end):
        found = find(geometry, objects, position, first, end)
        return np.maximum(found - 1, 0) if objects.kind is Kind.STATE else found

    patch.setattr(stores, "kept_columns", columns)


def state_from_the_end(patch: Patch) -> None:
    find = scheduler.find_candidate

    def candidate(geometry, chunks, digests, tables, states):
        found = find(geometry, chunks, digests, tables, states)
        for objects, of_group in zip(geometry.object_groups, found.block_ids, strict=True):
            for position, group in enumerate(objects.groups):
                if geometry.groups[group].kind is Kind.STATE:
                    of_group[position][:] = tables[group][-1]
        return found

    patch.setattr(scheduler, "find_candidate", candidate)


def drafts_stored(patch: Patch) -> None:
    """Under the keys of the tokens that are expected, while the pages hold what was drafted."""
    hashed = RequestState.hashed_chunks

    def expectant(self):
        hashed(self)
        request = copy.copy(self.request)
        request._all_token_ids = list(request._all_token_ids)
        for _ in range(3):
            request._all_token_ids.append(next_token(request._all_token_ids))
        request.all_token_ids = request._all_token_ids
        request.block_hashes = list(request.block_hashes)
        request.update_block_hashes()
        ratio = self.geometry.chunk_tokens // self.geometry.hash_block_tokens
        known = len(self.digests)
        self.digests += [self._digest(h) for h in request.block_hashes[ratio - 1 :: ratio][known:]]
        return len(self.digests)

    def frontier(self, num_computed, num_drafts, num_unsettled):
        return min(num_computed // self.geometry.chunk_tokens, expectant(self))

    patch.setattr(RequestState, "frontier_chunks", frontier)


def null_block_stored(patch: Patch) -> None:
    find, store = scheduler.find_candidate, Copier.store

    def candidate(*arguments):
        found = find(*arguments)
        found.writable[:] = True
        return found

    def careless(self, plan, stop):
        store(self, plan, stop)
        return np.ones(plan.num_objects, dtype=np.bool_)

    patch.setattr(scheduler, "find_candidate", candidate)
    patch.setattr(Copier, "store", careless)


def commit_before_copy(patch: Patch) -> None:
    plan_stores = SchedulerHalf._plan_stores

    def eager(self, output):
        plans = plan_stores(self, output)
        for plan in plans:
            del self._owed[plan.reservation]
            self._client.commit(plan.boot_id, plan.reservation, b"\1" * plan.num_objects)
        return plans

    patch.setattr(SchedulerHalf, "_plan_stores", eager)


def wrong_rank_offset(patch: Patch) -> None:
    part = Copier._part

    def of_first_rank(self, plan, position):
        found = part(self, plan, position)
        objects = self._geometry.object_groups[plan.object_group]
        return found and _Part(found.pages, found.kept, objects.offsets[0][position], found.writes)

    patch.setattr(Copier, "_part", of_first_rank)


def stale_block_table(patch: Patch) -> None:
    find = scheduler.find_candidate
    last: dict[int, Any] = {}

    def candidate(geometry, chunks, digests, tables, states):
        before = last.get(id(digests), tables)
        last[id(digests)] = tuple(list(table) for table in tables)
        return find(geometry, chunks, digests, before, states)

    patch.setattr(scheduler, "find_candidate", candidate)


# Namespace


def hash_algorithm_missing(patch: Patch) -> None:
    patch.setattr(identity, "_hash_seed", lambda vllm_config: "any")


# Loads


def lease_dropped_early(patch: Patch) -> None:
    admit = SchedulerHalf.admit

    def hasty(self, request, tables, num_external):
        admit(self, request, tables, num_external)
        self._release(self._state(request))

    patch.setattr(SchedulerHalf, "admit", hasty)


def local_blocks_overwritten(patch: Patch) -> None:
    copy_group = loads._copy_group

    def greedy(geometry, number, hit, tables, tokens):
        return copy_group(geometry, number, hit, tables, (0, tokens[1]))

    patch.setattr(loads, "_copy_group", greedy)


def failed_load_offered_again(patch: Patch) -> None:
    take = SchedulerHalf.take_reports

    def forgetful(self, output):
        states = [self._in_flight.get(request) for request in output.finished_recving or ()]
        take(self, output)
        for state in filter(None, states):
            state.no_load = False

    patch.setattr(SchedulerHalf, "take_reports", forgetful)


def block_left_unloaded(patch: Patch) -> None:
    copy_group = loads._copy_group

    def partial(geometry, number, hit, tables, tokens):
        copy = copy_group(geometry, number, hit, tables, tokens)
        if copy is not None:
            copy.block_ids[-1][-1, -1] = 0
        return copy

    patch.setattr(loads, "_copy_group", partial)
    patch.setattr(loads, "_blocks_to_fill", lambda *arguments: set())


def _report_early(patch: Patch, whole: bool) -> None:
    """What the copy thread still does is reported as if it had ended."""
    load = Transfers.load

    def hasty(self, plan, inline):
        load(self, plan, inline)
        with self._changed:
            if plan.request not in self._ended and self._owed_loads:
                self._ended[plan.request] = whole
                self._told = {*getattr(self, "_told", ()), plan.request}

    end = Transfers._load

    def quiet(self, plan, deadline_s):
        told = getattr(self, "_told", set())
        ended = dict(self._ended)
        end(self, plan, deadline_s)
        if plan.request in told:
            told.discard(plan.request)
            with self._changed:
                if plan.request not in ended:
                    self._ended.pop(plan.request, None)

    patch.setattr(Transfers, "load", hasty)
    patch.setattr(Transfers, "_load", quiet)


def failure_reported_early(patch: Patch) -> None:
    _report_early(patch, whole=False)


def success_reported_early(patch: Patch) -> None:
    _report_early(patch, whole=True)


def load_never_reported(patch: Patch) -> None:
    take = Transfers.take_loads

    def deaf(self):
        ended, failed = take(self)
        return ended - failed, set()

    patch.setattr(Transfers, "take_loads", deaf)


def lease_never_released(patch: Patch) -> None:
    patch.setattr(SchedulerClient, "release", lambda self, request: None)


def boot_id_ignored(patch: Patch) -> None:
    copying = Transfers._copying

    def trusting(self, plan):
        attachment = self._attached()
        if attachment is not None:
            plan = replace(plan, boot_id=attachment.boot_id, epoch=attachment.epoch)
        return copying(self, plan)

    patch.setattr(Transfers, "_copying", trusting)


def adapter_ignored(patch: Patch) -> None:
    """The digest of a chunk is that of its first block only, so what differs later is not seen."""
    digests = RequestState.hashed_chunks

    def shallow(self):
        available = digests(self)
        hashes = self.request.block_hashes
        ratio = self.geometry.chunk_tokens // self.geometry.hash_block_tokens
        self.digests[:] = [bytes(hashes[i * ratio]) for i in range(available)]
        return available

    patch.setattr(RequestState, "hashed_chunks", shallow)


FAULTS: dict[str, Fault] = {
    "state taken one block off": Fault(
        "a state is stored from the column before the one it stands in",
        state_one_block_off,
        geometries=STATES,
        tune=on(retention=None),
    ),
    "last column instead of the token's": Fault(
        "a state is stored from the last column of the table, where drafts' states and later ones lie",
        state_from_the_end,
        geometries=STATES,
    ),
    "draft tokens stored": Fault(
        "a chunk is stored while its last tokens are drafts, as if all of them were accepted",
        drafts_stored,
        tune=both(on(num_drafts=3), answers),
    ),
    "null block stored": Fault("objects with null blocks are stored as complete", null_block_stored),
    "commit before copy": Fault(
        "objects become visible when room was found for them",
        commit_before_copy,
        tune=between(lambda engine, random: Break(engine, 0, "store")),
    ),
    "window one chunk short": Fault(
        "the server thinks that windows reach one chunk less far",
        server="window one chunk short",
        geometries=("window", "wide window", "two windows"),
    ),
    "wrong rank offset": Fault(
        "every rank copies to where the first one does",
        wrong_rank_offset,
        geometries=("full, two ranks", "state, two ranks"),
    ),
    "lease dropped early": Fault(
        "the lease ends when the load is planned",
        lease_dropped_early,
        tune=both(little_room, between(lambda e, r: Slow(e, r.randint(3, 10)), lambda e, r: Clear(e, True))),
    ),
    "stale block table": Fault("stores use the block table of the step before", stale_block_table, tune=PREEMPT),
    "hash algorithm missing in the namespace": Fault(
        "two engines whose digests mean different things share objects", hash_algorithm_missing, tune=strangers
    ),
    "local blocks overwritten": Fault(
        "a load also writes the blocks of the engine's own hit", local_blocks_overwritten
    ),
    "failed load offered again": Fault(
        "a request is offered the hit again whose load failed",
        failed_load_offered_again,
        tune=between(lambda engine, random: Break(engine, 0, "loads")),
    ),
    "block left unloaded": Fault("the last block of every load is not written", block_left_unloaded),
    "failure reported before the last write": Fault(
        "a load that still runs is reported as failed", failure_reported_early, tune=SLOW
    ),
    "extent reused on end of stream alone": Fault(
        "the server gives away what an engine holds when its connections end, though its process lives",
        server="extents reused on end of stream",
        tune=both(two_engines, between(lambda engine, random: Cut(engine))),
    ),
    "commit of an old generation accepted": Fault(
        "objects that were written before a clear become visible after it",
        server="old generation committed",
        tune=both(on(late_save=True), between(lambda engine, random: Reweigh(True))),
    ),
    "success reported before the last write": Fault(
        "a load that still runs is reported as done", success_reported_early, tune=SLOW
    ),
    "failed load never reported": Fault(
        "the blocks of a failed load are never given back",
        load_never_reported,
        tune=between(lambda engine, random: Break(engine, 0, "load")),
    ),
    "lease never released": Fault("leases outlive their requests", lease_never_released),
    "boot id ignored": Fault(
        "a plan for a server that is gone is carried out on its successor",
        boot_id_ignored,
        tune=both(on(asynchronous=True), restart_under_load),
    ),
    "half a digest": Fault("chunks are told apart by their first block alone", adapter_ignored),
    "leases pin nothing": Fault(
        "the server forgets a lease as soon as it has answered",
        server="leases pin nothing",
        tune=both(little_room, between(lambda e, r: Slow(e, r.randint(3, 10)), lambda e, r: Clear(e, True))),
    ),
}
