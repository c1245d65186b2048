"""Plays one schedule: real servers and modelled engines, event by event, then a replay of everything that was asked.

Whatever is wrong raises, with the play's own story in `Play.now`. At the end every request has ended, every block is
free, and the server holds neither lease nor reservation. One thread drives everything, so a seed plays alike.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from functools import partial
from random import Random
from typing import Any

from vllm.v1.core.sched.interface import PauseState

from kvmosaic.engines.vllm.connector import faults as swallowed
from kvmosaic.testing import workload
from kvmosaic.testing.arenas import Servers
from kvmosaic.testing.faults import Faults, installed
from kvmosaic.testing.geometries import GEOMETRIES
from kvmosaic.testing.modelled import ModelledEngine
from kvmosaic.testing.planned import Settings
from kvmosaic.testing.requests import Ask
from kvmosaic.testing.serving import wait_until
from kvmosaic.testing.workload import Event, Schedule

MAX_STEPS = 3000
REPLAYED = 8
UNWEDGE_EVERY = 300


@dataclass(slots=True)
class Counts:
    """What schedules came to."""

    schedules: int = 0
    steps: int = 0
    checked_pages: int = 0
    hits: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    aborts: int = 0
    failed_loads: int = 0
    evictions: int = 0
    restarts: int = 0
    cuts: int = 0
    clears: int = 0
    wedged: int = 0

    def add(self, other: Counts) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    def __str__(self) -> str:
        return ", ".join(f"{one.name.replace('_', ' ')} {getattr(self, one.name)}" for one in fields(self))


class Play:
    """One schedule. run() once; then `engines` show how it ended."""

    def __init__(self, schedule: Schedule, servers: Servers) -> None:
        self.schedule = schedule
        self.counts = Counts(schedules=1)
        self.engines: list[ModelledEngine] = []
        self.now = "start"
        self._server = servers.get(schedule.server)
        self._servers = servers
        self._folder = servers.folder
        self._faults = [Faults() for _ in range(schedule.engines)]
        self._asked: list[tuple[int, Ask]] = []
        self._model = f"{schedule.geometry} {schedule.seed}"
        self._weights = 0
        self._scattered = False
        self._storing: list[ModelledEngine] = []

    def run(self) -> Counts:
        faults_before = dict(swallowed)
        with installed(self._faults):
            try:
                self._start()
                self._play()
                self._end()
            finally:
                self._close()
        new = {name: count for name, count in swallowed.items() if count != faults_before.get(name, 0)}
        assert not new, f"exceptions were swallowed in {new}"
        return self.counts

    # Beginning and end

    def _start(self) -> None:
        self._server.clear()
        schedule = self.schedule
        for number in range(schedule.engines):
            stranger = self._salt(number)
            settings = schedule.settings
            if stranger:
                values = {one.name: getattr(settings, one.name) for one in fields(settings)}
                settings = Settings(**{**values, "hash_algorithm": "sha256_cbor"})
            engine = ModelledEngine(
                self._folder / "model",
                GEOMETRIES[schedule.geometry],
                {
                    "kvmosaic.socket": str(self._server.socket),
                    "kvmosaic.model_tag": self._model,
                    "kvmosaic.lookup_timeout_ms": 5000,  # a busy machine must not turn a hit into a miss
                },
                settings,
                seed=schedule.seed + number,
                salt=stranger,
            )
            faults = self._faults[number]
            engine.before_loads = partial(plan_faults, engine, faults)
            engine.after_loads = partial(settle, engine, faults)
            self.engines.append(engine)
        wait_until(self._attached, 20)

    def _attached(self) -> bool:
        return all(engine.connector._scheduler._session.attachment is not None for engine in self.engines)

    def _play(self) -> None:
        for number, event in enumerate(self.schedule.events):
            self.now = f"event {number}: {event}"
            self._happen(event)

    def _end(self) -> None:
        self.now = "coming to rest"
        self._rest()
        self._replay()
        self.now = "at rest"
        for engine in self.engines:
            engine.check_rest()
        self._check_failures()
        self._check_server()

    def _check_failures(self) -> None:
        """Loads fail only because of a fault that was injected."""
        if any(isinstance(event, workload.Restart | workload.Cut) for event in self.schedule.events):
            return
        failed = sum(worker._worker.statistics.failed_loads for engine in self.engines for worker in engine.workers)
        injected = sum(faults.num_failed for faults in self._faults)
        assert failed <= injected, f"{failed} loads failed, and {injected} of them had to"

    def _check_server(self, timeout_s: float = 10.0) -> None:
        """Releases and commits are one-way, so they may take a moment to arrive."""
        deadline = time.monotonic() + timeout_s
        allowed = (0, self._servers.ballast(self.schedule.server))
        while (held := self._held()) != allowed:
            assert time.monotonic() < deadline, f"the server holds {held[0]} leases and {held[1]} reservations"
            time.sleep(0.005)

    def _held(self) -> tuple[int, int]:
        report = self._server.status()
        return report["leases"], report["reservations"]

    def _replay(self) -> None:
        """Ask again, from empty caches of the engines: whatever was stored is read."""
        for engine in self.engines:
            engine.drop_own_cache()
        asked = Random(self.schedule.seed).sample(self._asked, min(REPLAYED, len(self._asked)))
        for number, (_, ask) in enumerate(asked):
            self.now = f"replay of {ask.name}"
            again = Ask(f"replay {number}", ask.tokens, 1, ask.salt, ask.adapter, ask.images)
            self.engines[number % len(self.engines)].ask(again)
            self._rest()

    def _rest(self) -> None:
        for number in range(MAX_STEPS):
            if not any(engine.busy for engine in self.engines):
                return
            self._turn()
            if number % UNWEDGE_EVERY == UNWEDGE_EVERY - 1:
                self._unwedge()
        raise AssertionError(f"the engines do not come to rest within {MAX_STEPS} steps")

    def _unwedge(self) -> None:
        """A user would give up, too."""
        for engine in self.engines:
            for name in engine.wedged()[-1:]:
                self.counts.wedged += 1
                engine.abort(name)

    def _close(self) -> None:
        for faults in self._faults:
            faults.release()
        for engine in self.engines:
            self.counts.steps += engine.num_steps
            self.counts.checked_pages += engine.runner.num_checks
            self.counts.hits += len(engine.external)
            self.counts.hit_tokens += sum(engine.external.values())
            self.counts.preemptions += engine.num_preemptions
            self.counts.failed_loads += sum(worker._worker.statistics.failed_loads for worker in engine.workers)
            engine.close()

    # Events

    def _happen(self, event: Event) -> None:
        match event:
            case workload.Add(engine, ask):
                self._asked.append((engine, ask))
                self.engines[engine].ask(ask)
            case workload.Turn(steps):
                for _ in range(steps):
                    self._turn()
            case workload.Restart(steps):
                self._restart(steps)
            case workload.Reweigh(operator):
                self._reweigh(operator)
            case workload.Clear(_, operator=True):
                self.counts.clears += 1
                self._server.clear(self._model)
            case _:
                self._trouble(self.engines[event.engine], self._faults[event.engine], event)

    def _trouble(self, engine: ModelledEngine, faults: Faults, event: Any) -> None:
        match event:
            case workload.Abort(_, nth):
                names = list(engine.scheduler.requests)
                if names:
                    self.counts.aborts += 1
                    engine.abort(names[nth % len(names)])
            case workload.Reset(_, running):
                self._reset(engine, running, connector=False)
            case workload.Clear():
                self.counts.clears += 1
                self._reset(engine, running=True, connector=True)
            case workload.Evict(_, seed, chance):
                random = Random(seed)
                self.counts.evictions += engine.evict(lambda blocks: [b for b in blocks if random.random() < chance])
            case workload.Pause(_, steps):
                engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
                for _ in range(steps):
                    self._turn()
                engine.scheduler.set_pause_state(PauseState.UNPAUSED)
            case workload.Slow(_, steps):
                faults.slow.append(steps)
            case workload.Cut():
                faults.interrupt = partial(self._cut, engine)
            case workload.Break(_, rank, how):
                faults.broken.append((rank % engine.geometry.ranks, how))

    def _reset(self, engine: ModelledEngine, running: bool, connector: bool) -> None:
        """As the engine's core does: with steps in flight or loads on their way nothing is preempted."""
        engine.drain()
        running = running and not engine.holds_waiting()
        engine.reset(running, connector)

    def _reweigh(self, operator: bool) -> None:
        """Only while no load is on its way: vLLM does not preempt a request that waits for one."""
        for engine in self.engines:
            engine.drain()
        if any(engine.holds_waiting() for engine in self.engines):
            return
        self._weights += 1
        self.counts.clears += 1
        for number, engine in enumerate(self.engines):
            engine.reset(running=True, connector=not operator)
            engine.reweigh(f"{self._salt(number)}, weights {self._weights}")
        if operator:
            self._server.clear(self._model)

    def _cut(self, engine: ModelledEngine) -> None:
        """The engine's connections end, its process lives on and copies; the others find out what is free."""
        sessions = [worker._worker._session for worker in engine.workers] + [engine.connector._scheduler._session]
        for session in sessions:
            if (attachment := session.attachment) is not None:
                attachment.connection.shutdown()
        wait_until(lambda: all(session.attachment is None for session in sessions))
        self.counts.cuts += 1
        self._scattered = True
        self._storing.append(engine)
        for other, faults in zip(self.engines, self._faults, strict=True):
            if other not in self._storing:
                faults.release()
                for _ in range(3):
                    if other.busy:
                        other.step()
        self._storing.pop()

    def _salt(self, number: int) -> str:
        return "stranger" if self.schedule.stranger and number == self.schedule.engines - 1 else ""

    def _restart(self, steps: int) -> None:
        self.counts.restarts += 1
        self._server.kill()
        for _ in range(steps):
            self._turn()
        self._server.start()
        self._servers.refill(self.schedule.server)
        self._gather()

    def _gather(self) -> None:
        """Let every engine attach again; held copies would keep it from that."""
        for faults in self._faults:
            faults.release()
        wait_until(self._attached, 20)
        self._scattered = False

    def _turn(self) -> None:
        if self._scattered:
            self._gather()
        for engine, faults in zip(self.engines, self._faults, strict=True):
            faults.release(engine.num_steps)
            if engine.busy:
                engine.step()
            else:
                engine.num_steps += 1


def plan_faults(engine: ModelledEngine, faults: Faults, meta: Any) -> None:
    faults.plan(meta, engine.num_steps)


def settle(engine: ModelledEngine, faults: Faults, timeout_s: float = 20.0) -> None:
    """Wait for the loads that nobody holds, so that a seed plays alike on any machine."""
    deadline = time.monotonic() + timeout_s
    while any(worker._worker.loads_in_progress for worker in engine.workers) and not faults.holding:
        assert time.monotonic() < deadline, "a load does not end"
        time.sleep(0.0002)
