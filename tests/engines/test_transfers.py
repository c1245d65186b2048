"""Which copies run and what is reported: each plan exactly once, nothing before its last byte, nothing after a loss."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvmosaic.client import Attachment, Connection
from kvmosaic.core.types import BootId, ReservationId
from kvmosaic.engines.plans import CopyPlan, LoadPlan, StorePlan
from kvmosaic.engines.transfers import Statistics, Transfers
from kvmosaic.memory import arena
from kvmosaic.testing.serving import wait_until
from tests.engines.memory import Rank, full, geometry_of, plan_of, state

BOOT, OTHER_BOOT = BootId("boot"), BootId("other")
CHUNK, EPOCH, NUM_OBJECTS = 16, 3, 4
ARENA_BYTES = 1 << 16


class Bench:
    """One rank, one arena, one attachment; `attached` is what Transfers asks, and may be told to block."""

    def __init__(self, store_bytes_per_step: int = 1 << 30, load_timeout_s: float = 60.0) -> None:
        self.rank = Rank([("layers outside", 0), ("blocks outside", 0)], np.random.default_rng(0))
        self.geometry = geometry_of([self.rank], [full(), state(CHUNK)], CHUNK)
        fd = arena.create(ARENA_BYTES)
        self.arena = arena.attach(fd, ARENA_BYTES)
        os.close(fd)
        near, self._far = socket.socketpair()
        self.connection = Connection(near)
        self.current: Attachment | None = Attachment(BOOT, EPOCH, self.geometry, self.arena, self.connection)
        self.asked = 0
        self.gate = threading.Event()
        self.gate.set()
        self.transfers = Transfers(
            0,
            self.rank.pages,
            self.attached,
            store_bytes_per_step=store_bytes_per_step,
            load_timeout_s=load_timeout_s,
        )

    def attached(self) -> Attachment | None:
        current = self.current
        self.asked += 1
        if self.asked > 1:  # the first question is asked before a copy begins, later ones while it runs
            assert self.gate.wait(10.0)
        return current

    def copies(self, object_group: int) -> CopyPlan:
        """All objects of one group, each in an extent of its own; block ids 1, 2, …"""
        objects = self.geometry.object_groups[object_group]
        start = object_group * ARENA_BYTES // 2
        extents = [[(start + number * objects.object_bytes, objects.object_bytes)] for number in range(NUM_OBJECTS)]
        ids = [
            1 + np.arange(NUM_OBJECTS * kept, dtype=np.int64).reshape(NUM_OBJECTS, kept) % 15
            for kept in objects.kept_blocks
        ]
        return plan_of(object_group, extents, ids)

    def load_plan(self, request: str = "r", boot_id: BootId = BOOT, epoch: int = EPOCH) -> LoadPlan:
        return LoadPlan(boot_id, epoch, request, (self.copies(0), self.copies(1)))

    def store_plan(self, number: int = 1, boot_id: BootId = BOOT) -> StorePlan:
        """Objects of the full group are 0, 2, 4, …, states 1, 3, 5, … in the reservation."""
        numbers = (np.arange(NUM_OBJECTS) * 2, np.arange(NUM_OBJECTS) * 2 + 1)
        copies = (self.copies(0), self.copies(1))
        return StorePlan(boot_id, EPOCH, ReservationId(number), 2 * NUM_OBJECTS, copies, numbers)

    def pages(self) -> list[bytes]:
        return [storage.tobytes() for storage in self.rank.storages]

    def close(self) -> None:
        self.gate.set()
        self.transfers.check()
        self.transfers.close()
        self.current = None
        self.arena.close()
        self.connection.close()
        self._far.close()


Make = Callable[..., Bench]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Bench] = []

    def build(**options: float) -> Bench:
        made.append(Bench(**options))  # type: ignore[arg-type]  # the options of Bench
        return made[-1]

    yield build
    for bench in made:
        bench.close()


@pytest.mark.parametrize("inline", [True, False])
def test_a_load_is_reported_once_after_its_last_byte(make: Make, inline: bool) -> None:
    bench = make()
    bench.transfers.store([bench.store_plan()])
    before = bench.pages()
    for storage in bench.rank.storages:
        storage[:] = 0
    bench.transfers.load(bench.load_plan(), inline)
    wait_until(lambda: bench.transfers.statistics.loaded_bytes)
    copied = [np.frombuffer(now, np.uint8) for now in bench.pages()]
    for now, then in zip(copied, before, strict=True):
        assert ((now == 0) | (now == np.frombuffer(then, np.uint8))).all()
        assert now.any()
    assert bench.transfers.take_loads() == ({"r"}, set())
    assert bench.transfers.take_loads() == (set(), set())


def test_a_load_of_nothing_is_reported_too(make: Make) -> None:
    bench = make()
    bench.transfers.load(replace(bench.load_plan(), copies=()), inline=False)
    wait_until(lambda: bench.transfers.take_loads() == ({"r"}, set()))


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("why", ["other boot", "older epoch", "lost", "suspended", "closed", "no time"])
def test_a_load_that_cannot_run_is_reported_as_failed_once(make: Make, why: str, inline: bool) -> None:
    bench = make(load_timeout_s=-1.0 if why == "no time" else 60.0)
    plan = bench.load_plan(boot_id=OTHER_BOOT if why == "other boot" else BOOT, epoch=EPOCH - (why == "older epoch"))
    if why == "lost":
        bench.current = None
    if why == "suspended":
        bench.transfers.suspend()
    if why == "closed":
        bench.transfers.close()
        inline = True  # the engine plans nothing more after it closed the connector
    before = bench.pages()
    bench.transfers.load(plan, inline)
    wait_until(lambda: bench.transfers.statistics.failed_loads)
    assert bench.transfers.take_loads() == ({"r"}, {"r"})
    assert bench.transfers.take_loads() == (set(), set())
    assert bench.pages() == before


def test_a_later_epoch_is_served_since_this_rank_did_not_change(make: Make) -> None:
    bench = make()
    bench.transfers.load(bench.load_plan(epoch=EPOCH + 1), inline=True)
    assert bench.transfers.take_loads() == ({"r"}, set())


def test_a_plan_out_of_bounds_fails_its_request_alone(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    bench = make()
    bad = replace(bench.copies(0), num_objects=NUM_OBJECTS + 1)
    with caplog.at_level(logging.ERROR):
        bench.transfers.load(LoadPlan(BOOT, EPOCH, "bad", (bad,)), inline=False)
        bench.transfers.load(bench.load_plan("good"), inline=False)
        wait_until(lambda: bench.transfers.statistics.loaded_bytes)
        bench.transfers.store([replace(bench.store_plan(7), copies=(bad,), numbers=(np.arange(NUM_OBJECTS + 1),))])
    assert bench.transfers.take_loads() == ({"bad", "good"}, {"bad"})
    assert bench.transfers.take_stored() == {7: (1, bytes(2 * NUM_OBJECTS))}
    assert "request bad failed" in caplog.text
    assert "reservation 7 failed" in caplog.text


@pytest.mark.parametrize("ending", ["end_copies", "suspend"])
def test_a_loss_is_answered_when_the_last_copy_has_ended(make: Make, ending: str) -> None:
    bench = make()
    bench.gate.clear()
    bench.transfers.load(bench.load_plan(), inline=False)
    wait_until(lambda: bench.asked > 1)
    assert bench.transfers.take_loads() == (set(), set()), "not before it has ended"
    lost = bench.current
    bench.current = None if ending == "end_copies" else lost
    waiting = threading.Thread(target=getattr(bench.transfers, ending))
    waiting.start()
    waiting.join(0.02)
    assert waiting.is_alive(), "a copy still runs"
    bench.gate.set()
    waiting.join(10.0)
    assert not waiting.is_alive()
    wait_until(lambda: bench.transfers.statistics.failed_loads or bench.transfers.statistics.loaded_bytes)
    ended, failed = bench.transfers.take_loads()
    assert ended == {"r"}
    assert failed <= ended


def test_copies_run_again_after_a_sleep(make: Make) -> None:
    bench = make()
    bench.transfers.suspend()
    bench.transfers.suspend()
    bench.transfers.store([bench.store_plan(1)])
    bench.transfers.resume()
    bench.transfers.store([bench.store_plan(2)])
    assert bench.transfers.take_stored() == {1: (1, bytes(8)), 2: (1, b"\1" * 8)}


def test_stores_are_reported_once_with_every_object_of_the_reservation(make: Make) -> None:
    bench = make()
    bench.transfers.store([bench.store_plan(1), bench.store_plan(2, OTHER_BOOT)])
    assert bench.transfers.take_stored() == {1: (1, b"\1" * 8), 2: (1, bytes(8))}
    assert bench.transfers.take_stored() == {}


def test_beyond_the_budget_states_go_first_and_the_rest_is_dropped(make: Make) -> None:
    bench = make()
    full_bytes, state_bytes = (objects.object_bytes for objects in bench.geometry.object_groups)
    limited = make(store_bytes_per_step=NUM_OBJECTS * state_bytes + full_bytes + 1)
    limited.transfers.store([limited.store_plan(1), limited.store_plan(2)])
    stored = limited.transfers.take_stored()
    assert stored[ReservationId(1)] == (1, bytes([1, 1, 1, 1, 0, 1, 0, 1]))
    assert stored[ReservationId(2)] == (1, bytes(8))
    assert limited.transfers.statistics == Statistics(
        loaded_bytes=0,
        failed_loads=0,
        stored_bytes=NUM_OBJECTS * state_bytes + 2 * full_bytes,
        dropped_objects=2 + 8,
    )
    limited.transfers.store([limited.store_plan(3)])
    assert limited.transfers.take_stored()[ReservationId(3)][1].count(1) == 6, "every step has a budget of its own"


def test_an_object_larger_than_the_budget_is_stored_alone(make: Make) -> None:
    bench = make(store_bytes_per_step=1)
    bench.transfers.store([bench.store_plan()])
    assert bench.transfers.take_stored()[ReservationId(1)][1].count(1) == 1


def test_close_ends_the_thread_and_may_be_repeated(make: Make) -> None:
    bench = make()
    before = threading.active_count()
    bench.transfers.load(bench.load_plan(), inline=False)
    bench.transfers.close()
    bench.transfers.close()
    assert threading.active_count() == before - 1
    ended, failed = bench.transfers.take_loads()
    assert ended == {"r"}
    assert failed <= ended
