"""Which copies of one rank may run, on which thread, and what is still owed to the scheduler half.

    plan of a load  -> copy thread (or inline) -> ended, once: whole or failed -> take_loads()
    plan of a store -> inline, under a budget  -> report, once                 -> take_stored()

A plan is carried out only against the attachment it was made for; every other ends as failed or unwritten. Nothing
is reported before its last byte has moved. Called by the worker half on the engine's thread; end_copies() on the
session's thread. Knows no engine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from kvmosaic.client import Attachment
from kvmosaic.core.types import ReservationId
from kvmosaic.engines.copying import Copier, PageMap, Stop, first_objects
from kvmosaic.engines.plans import LoadPlan, StorePlan

logger = logging.getLogger(__name__)

# The engine computes nothing while a store runs: about 0.1 s at the speed of one memory channel.
STORE_BYTES_PER_STEP = 1 << 30
# Blocks of a load are held until it is reported, so none may wait for ever.
LOAD_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Statistics:
    """Since the start."""

    loaded_bytes: int
    failed_loads: int
    stored_bytes: int
    dropped_objects: int


class Transfers:
    """See the module. `attached` gives the current attachment, None when there is none."""

    def __init__(
        self,
        rank: int,
        pages: Sequence[PageMap],
        attached: Callable[[], Attachment | None],
        *,
        store_bytes_per_step: int = STORE_BYTES_PER_STEP,
        load_timeout_s: float = LOAD_TIMEOUT_S,
    ) -> None:
        self._rank = rank
        self._pages = tuple(pages)
        self._attached = attached
        self._store_bytes_per_step = store_bytes_per_step
        self._load_timeout_s = load_timeout_s
        self._queue: SimpleQueue[tuple[LoadPlan, float] | None] = SimpleQueue()
        # A leaf lock: nothing else is locked, asked or copied under it.
        self._changed = threading.Condition()
        self._running = 0
        self._suspended = False
        self._owed_loads = 0
        self._ended: dict[str, bool] = {}
        self._stored: dict[ReservationId, tuple[int, bytes]] = {}
        self._statistics = Statistics(0, 0, 0, 0)
        self._thread = threading.Thread(target=self._copy_loads, name="kvmosaic-copies", daemon=True)
        self._thread.start()

    @property
    def statistics(self) -> Statistics:
        return self._statistics

    @property
    def loads_in_progress(self) -> int:
        """Loads that were begun and have not ended."""
        with self._changed:
            return self._owed_loads - len(self._ended)

    def load(self, plan: LoadPlan, inline: bool) -> None:
        """Start a load, or with `inline` carry it out."""
        deadline_s = time.monotonic() + self._load_timeout_s
        with self._changed:
            self._owed_loads += 1
        if inline:
            self._load(plan, deadline_s)
        else:
            self._queue.put((plan, deadline_s))

    def take_loads(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended since the last call, and those of them that failed."""
        with self._changed:
            ended, self._ended = self._ended, {}
            self._owed_loads -= len(ended)
        return set(ended), {request for request, whole in ended.items() if not whole}

    def store(self, plans: Sequence[StorePlan]) -> None:
        """Carry out the stores of one step; objects beyond the budget are dropped."""
        budget = self._store_bytes_per_step
        for plan in plans:
            written = np.zeros(plan.num_objects, dtype=np.uint8)
            try:
                stored_bytes = self._store(plan, written, budget)
            except Exception:  # the engine boundary: whatever went wrong, these objects are not there
                logger.exception("storing reservation %d failed", plan.reservation)
                written[:] = stored_bytes = 0
            budget -= stored_bytes
            with self._changed:
                self._stored[plan.reservation] = (1, written.tobytes())
            self._count(stored_bytes=stored_bytes, dropped_objects=plan.num_objects - int(written.sum()))

    def take_stored(self) -> dict[ReservationId, tuple[int, bytes]]:
        """Reports of the stores since the last call, in the form of engines.vllm.plans.WorkerReport."""
        with self._changed:
            stored, self._stored = self._stored, {}
        return stored

    def end_copies(self) -> None:
        """Return when no copy runs that was begun with an attachment which is no longer the current one."""
        with self._changed:
            self._changed.wait_for(lambda: self._running == 0)

    def suspend(self) -> None:
        """The pages go away: end all copies and start none until resume()."""
        with self._changed:
            self._suspended = True
            self._changed.wait_for(lambda: self._running == 0)

    def resume(self) -> None:
        """The pages are back, at the same addresses."""
        with self._changed:
            self._suspended = False

    def close(self) -> None:
        """End all copies and the thread; later plans end as failed. Idempotent."""
        self.suspend()
        self._queue.put(None)
        self._thread.join()

    def check(self) -> None:
        """Every ended load is owed a report, and no count is negative."""
        with self._changed:
            assert self._running >= 0, "more copies ended than began"
            assert self._owed_loads >= len(self._ended), "a load was reported twice"

    # Copies; on either thread.

    def _copy_loads(self) -> None:
        while (job := self._queue.get()) is not None:
            self._load(*job)

    def _load(self, plan: LoadPlan, deadline_s: float) -> None:
        whole, loaded_bytes = False, 0
        try:
            with self._copying(plan) as ground:
                if ground is not None:
                    copier, lost = ground
                    stop: Stop = lambda: lost() or time.monotonic() > deadline_s  # noqa: E731  # reads as a value
                    whole = all(copier.load(copy, stop) for copy in plan.copies)
                    loaded_bytes = sum(copier.part_bytes(copy) for copy in plan.copies)
        except Exception:  # the engine boundary: a load that is never reported keeps its blocks for ever
            logger.exception("loading request %s failed", plan.request)
        with self._changed:
            self._ended[plan.request] = whole
        self._count(loaded_bytes=loaded_bytes if whole else 0, failed_loads=int(not whole))

    def _store(self, plan: StorePlan, written: npt.NDArray[np.uint8], budget: int) -> int:
        """Mark the written objects; the bytes it took."""
        stored_bytes = 0
        with self._copying(plan) as ground:
            if ground is None:
                return 0
            copier, lost = ground
            copies = zip(plan.copies, plan.numbers, strict=True)
            for copy, numbers in sorted(copies, key=lambda pair: not copier.is_state(pair[0])):
                object_bytes = max(1, copier.part_bytes(copy) // max(1, copy.num_objects))
                # Rounded up, so that an object larger than the budget is not dropped for ever.
                affordable = first_objects(copy, -(-max(0, budget - stored_bytes) // object_bytes))
                complete = copier.store(affordable, lost)
                written[numbers[: affordable.num_objects]] = complete
                stored_bytes += copier.part_bytes(affordable)
        return stored_bytes

    @contextmanager
    def _copying(self, plan: LoadPlan | StorePlan) -> Iterator[tuple[Copier, Stop] | None]:
        """The arena stays mapped inside; None when the plan is not for the current attachment.

        An attachment is gone for readers before end_copies() is asked to wait, so that a copy either is counted
        by then or sees that it may not begin.
        """
        with self._changed:
            attachment = None if self._suspended else self._attached()
            self._running += 1
        try:
            if attachment is None or attachment.boot_id != plan.boot_id or plan.epoch < attachment.epoch:
                yield None
            else:
                arena = attachment.arena
                assert arena is not None, "a worker's attachment has an arena"
                copier = Copier(attachment.geometry, self._rank, self._pages, arena.address, arena.num_bytes)
                yield copier, lambda: self._suspended or self._attached() is not attachment
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _count(self, **more: int) -> None:
        with self._changed:
            now = self._statistics
            self._statistics = replace(now, **{name: getattr(now, name) + n for name, n in more.items()})
