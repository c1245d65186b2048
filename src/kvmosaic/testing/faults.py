"""Injected faults of copies: loads that take many steps, loads and stores that fail on one rank.

Owns what is planned for whose next copies; replaces the copier's two verbs while `installed()`. Loads that are held
block the copy thread of a worker, as a slow machine would; release() lets them go.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmosaic.engines.copying import Copier, Stop
from kvmosaic.engines.plans import CopyPlan


@dataclass(slots=True)
class Gate:
    """Closed until the engine's step `until`."""

    until: int
    opened: threading.Event = field(default_factory=threading.Event)
    blocked: int = 0


@dataclass
class Faults:
    """Of one engine."""

    slow: deque[int] = field(default_factory=deque)
    broken: deque[tuple[int, str]] = field(default_factory=deque)
    interrupt: Callable[[], None] | None = None
    """Called once, in the middle of the next store."""
    stores: set[int] = field(default_factory=set)
    num_failed: int = 0
    _all_loads: bool = False
    _gates: dict[int, Gate] = field(default_factory=dict)
    _breaks: dict[tuple[int, int], str] = field(default_factory=dict)
    _kept: list[CopyPlan] = field(default_factory=list)  # so that no id is used twice

    def plan(self, meta: Any, step: int) -> None:
        """Called with the connector's metadata of a step before its copies start."""
        for load in meta.loads:
            if load.copies and self.slow:
                meta.busy = True  # only the copy thread can be held
                self._gates[id(load.copies[0])] = Gate(step + self.slow.popleft())
                self._kept.append(load.copies[0])
            if load.copies and (self._all_loads or (self.broken and self.broken[0][1].startswith("load"))):
                self._break(load.copies[-1])
        self.stores = {id(copy) for store in meta.stores for copy in store.copies}
        for store in meta.stores:
            if store.copies and self.broken and self.broken[0][1].startswith("store"):
                self._break(store.copies[0])

    def _break(self, copy: CopyPlan) -> None:
        rank, how = (0, "load") if self._all_loads else self.broken.popleft()
        self._all_loads |= how == "loads"
        self._breaks[id(copy), rank] = how
        self._kept.append(copy)

    def release(self, step: int | None = None) -> None:
        """Open the gates that are due at this step; without a step, all."""
        for gate in self._gates.values():
            if step is None or gate.until <= step:
                gate.opened.set()

    @property
    def holding(self) -> int:
        """How many copy threads are held."""
        return sum(gate.blocked for gate in self._gates.values() if not gate.opened.is_set())

    def wait(self, plan: CopyPlan) -> None:
        gate = self._gates.get(id(plan))
        if gate is not None:
            gate.blocked += 1
            gate.opened.wait()

    def failure(self, plan: CopyPlan, rank: int) -> str | None:
        how = self._breaks.pop((id(plan), rank), None)
        self.num_failed += how is not None
        return how


@contextmanager
def installed(engines: list[Faults]) -> Iterator[None]:
    """Let the copies of this process obey these engines' faults."""
    load, store = Copier.load, Copier.store

    def faulty_load(self: Copier, plan: CopyPlan, stop: Stop) -> bool:
        for faults in engines:
            faults.wait(plan)
        how = next(filter(None, (faults.failure(plan, self._rank) for faults in engines)), None)
        if how is None:
            return load(self, plan, stop)
        if how == "load raises":
            raise OSError("injected")
        if how == "load half-way":
            load(self, plan, stop)
        return False

    def faulty_store(self: Copier, plan: CopyPlan, stop: Stop) -> npt.NDArray[np.bool_]:
        how = next(filter(None, (faults.failure(plan, self._rank) for faults in engines)), None)
        if how == "store":
            return np.zeros(plan.num_objects, dtype=np.bool_)
        for faults in engines:
            if faults.interrupt is not None and id(plan) in faults.stores:
                interrupt, faults.interrupt = faults.interrupt, None
                interrupt()
                stop = lambda: False  # noqa: E731  # a copy looks only now and then whether it should stop
        complete = store(self, plan, stop)
        if how is not None:
            complete[plan.num_objects // 2 :] = False
        return complete

    Copier.load, Copier.store = faulty_load, faulty_store  # type: ignore[method-assign]  # undone below
    try:
        yield
    finally:
        Copier.load, Copier.store = load, store  # type: ignore[method-assign]  # as it was
