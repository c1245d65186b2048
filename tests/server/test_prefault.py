import errno
import os
from collections.abc import Iterator

import pytest

from kvmosaic.memory import arena as arenas
from kvmosaic.memory.arena import Arena
from kvmosaic.server import prefault
from kvmosaic.server.machine import Memory
from kvmosaic.server.prefault import STEP_BYTES, Prefault
from kvmosaic.testing.serving import wait_until

GIB = 1 << 30


class Memories:
    """How much is available; a test changes it."""

    def __init__(self, available_bytes: int = 10 * GIB) -> None:
        self.available_bytes = available_bytes
        self.num_reads = 0

    def __call__(self) -> Memory:
        self.num_reads += 1
        return Memory(10 * GIB, self.available_bytes, "a test")


@pytest.fixture
def arena() -> Iterator[Arena]:
    size = 2 * STEP_BYTES + (1 << 20)
    fd = arenas.create(size)
    arena = arenas.attach(fd, size)
    yield arena
    arena.close()
    os.close(fd)


def test_the_whole_arena_becomes_usable_step_by_step(arena: Arena) -> None:
    marks: list[int] = []
    worker = Prefault(arena, Memories(), marks.append)
    worker.start()
    assert worker.wait_done(10)
    assert marks == [STEP_BYTES, 2 * STEP_BYTES, arena.num_bytes]


def test_with_little_memory_it_starts_small_and_grows_later(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "RETRY_S", 0.001)
    memories, marks = Memories(), []
    margin = 10 * GIB * 3 // 100

    def grow(mark: int) -> None:
        marks.append(mark)
        memories.available_bytes = margin + (1 << 20)  # just too little for even the last step

    worker = Prefault(arena, memories, grow)
    worker.start()
    wait_until(lambda: memories.num_reads > 5)
    assert marks == [STEP_BYTES]
    memories.available_bytes = 10 * GIB
    wait_until(lambda: len(marks) == 2)
    worker.stop()
    assert marks == [STEP_BYTES, 2 * STEP_BYTES]


def test_memory_that_is_gone_all_the_same_is_waited_for(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "RETRY_S", 0.001)
    failures = iter([errno.ENOMEM, errno.EFAULT])
    real = arena.populate

    def populate(offset: int, length: int) -> None:
        for number in failures:
            raise OSError(number, "no memory")
        real(offset, length)

    monkeypatch.setattr(arena, "populate", populate)
    marks: list[int] = []
    worker = Prefault(arena, Memories(), marks.append)
    worker.start()
    assert worker.wait_done(10)
    assert marks[-1] == arena.num_bytes


def test_it_stops_while_it_waits(arena: Arena) -> None:
    worker = Prefault(arena, Memories(0), lambda mark: None)
    worker.start()
    worker.stop()
    assert worker.wait_done(0)


def test_it_may_be_stopped_before_it_was_started(arena: Arena) -> None:
    Prefault(arena, Memories(), lambda mark: None).stop()
