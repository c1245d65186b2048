"""When the server gives away what dying, forking and returning engines held: only on the kernel's proof of death."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvmosaic.core.types import unpack_extents
from tests.faults.processes import EngineProcess, ServerProcess, wait_until

pytestmark = pytest.mark.slow

BLOCK_BYTES = 65536
NUM_CHUNKS = 64
"""Of 1 MiB each: as many as the arena holds."""

Step = Callable[[EngineProcess], object]


def reserved(engine: EngineProcess) -> Any:
    return engine.ask("reserve", seed=os.getpid(), first=0, count=8)


def leased(engine: EngineProcess) -> Any:
    engine.ask("store", seed=1, first=0, count=8)
    return engine.ask("lookup", request="r", seed=1, count=8, first=0)


def loading(engine: EngineProcess) -> None:
    plan = leased(engine)
    engine.tell("count_wrong", plan=plan)


def written(engine: EngineProcess) -> None:
    engine.ask("write", plan=reserved(engine))


def copying(engine: EngineProcess) -> None:
    engine.ask("hold_copy", plan=reserved(engine))


def stopped(engine: EngineProcess) -> None:
    leased(engine)
    reserved(engine)
    engine.send(signal.SIGSTOP)


def talking(engine: EngineProcess) -> None:
    for number in range(20):
        engine.tell("store", seed=100 + number, first=0, count=1)


STEPS: list[Step] = [
    EngineProcess.wait_ready,
    lambda engine: engine.ask("store", seed=1, first=0, count=8),
    reserved,
    written,
    copying,
    leased,
    loading,
    stopped,
    talking,
]


def holds(server: ServerProcess) -> dict[str, int]:
    """What engines hold; all zero when none is left."""
    report = server.status()
    return {name: report[name] for name in ("leases", "reservations", "quarantined", "sessions")} | {
        "engines": len(report["engines"])
    }


def holds_nothing(server: ServerProcess) -> bool:
    return not any(holds(server).values())


def reserve_all(engine: EngineProcess, seed: int) -> Any:
    """A plan for as much as the arena gives."""
    return engine.ask("reserve", seed=seed, first=0, count=NUM_CHUNKS)


def pieces(plan: Any) -> set[tuple[int, int]]:
    """The byte ranges of the arena that a plan uses."""
    return {piece for planned in plan["objects"] for piece in unpack_extents(bytes.fromhex(planned["extents"]))}


def overlap(plan: Any, other: Any) -> bool:
    return any(a < d and c < b for a, b in ranges(plan) for c, d in ranges(other))


def ranges(plan: Any) -> list[tuple[int, int]]:
    return [(offset, offset + length) for offset, length in pieces(plan)]


def uses_named_shared_memory(pid: int) -> bool:
    """Whether it could leave anything in /dev/shm, where other processes of the machine have files too."""
    opened = [os.path.realpath(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    return any("/dev/shm" in name for name in [*opened, Path(f"/proc/{pid}/maps").read_text()])


def num_sockets(pid: int) -> int:
    names = [os.path.realpath(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    return sum("socket:" in name for name in names)


def start(server: ServerProcess, name: str = "engine", **options: object) -> EngineProcess:
    engine = EngineProcess(server.socket, name, block_bytes=BLOCK_BYTES, **options)
    engine.wait_ready()
    return engine


@contextmanager
def forked(engine: EngineProcess, keep_sockets: bool) -> Iterator[int]:
    """The pid of a forked child, which lives until the end."""
    child = engine.ask("fork", keep_sockets=keep_sockets)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)


def test_twenty_killed_engines_leave_nothing(server: ServerProcess) -> None:
    def live_and_die(number: int) -> None:
        with EngineProcess(server.socket, f"engine {number}", block_bytes=BLOCK_BYTES) as engine:
            if number % 10:
                engine.wait_ready()
                STEPS[number % 10 - 1](engine)
                assert not uses_named_shared_memory(engine.pid)
        wait_until(lambda: holds_nothing(server), f"nothing is held after step {number % 10}: {holds(server)}")

    for number in range(10):
        live_and_die(number)
    num_fds, resident_bytes = server.num_fds(), server.resident_bytes()
    for number in range(20):
        live_and_die(number)
    assert server.num_fds() == num_fds
    assert server.resident_bytes() < resident_bytes + (2 << 20)
    assert not uses_named_shared_memory(server.pid)
    with start(server) as engine:
        plan = reserve_all(engine, seed=999)
        assert len(plan["objects"]) == NUM_CHUNKS, "every byte of the arena can be had again"


def test_a_living_engine_is_seen_by_the_same_measures(server: ServerProcess) -> None:
    num_fds = server.num_fds()
    with start(server) as engine:
        leased(engine)
        reserved(engine)
        found = holds(server)
        assert found == {"leases": 1, "reservations": 1, "quarantined": 0, "sessions": 2, "engines": 1}
        assert server.num_fds() > num_fds
        with start(server, "other") as other:
            assert len(reserve_all(other, seed=2)["objects"]) < NUM_CHUNKS


def test_named_shared_memory_would_be_seen() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm"):
        assert uses_named_shared_memory(os.getpid())


def test_a_forked_child_that_keeps_the_sockets_does_not_hide_the_death(server: ServerProcess) -> None:
    with start(server) as engine, forked(engine, keep_sockets=True) as child:
        leased(engine)
        plan = reserved(engine)
        wait_until(lambda: num_sockets(child) == 2, "the child has closed what it was not told to keep")
        assert holds(server)["leases"] == 1
        engine.kill()
        took_s = wait_until(lambda: holds_nothing(server), "the dead engine's holds are free")
        assert took_s < 2
        assert num_sockets(child) == 2, "the child still holds both"
        with start(server, "other") as other:
            assert overlap(plan, reserve_all(other, seed=3))


def test_a_forked_child_has_dropped_the_sockets_by_itself(server: ServerProcess) -> None:
    with start(server) as engine, forked(engine, keep_sockets=False) as child:
        wait_until(lambda: num_sockets(child) == 0, "the child has closed its copies")
        assert "kvmosaic-arena" not in Path(f"/proc/{child}/maps").read_text()
        assert engine.ask("store", seed=1, first=0, count=1) == 1, "and the parent does not notice"


class Halves:
    """An engine in two processes, whose worker is in the middle of a copy into `plan`."""

    def __init__(self, server: ServerProcess) -> None:
        self.scheduler = EngineProcess(server.socket, block_bytes=BLOCK_BYTES, ranks="")
        self.worker = EngineProcess(server.socket, block_bytes=BLOCK_BYTES, no_scheduler=True)
        self.plan: Any = None

    def __enter__(self) -> Halves:
        try:
            self.scheduler.wait_ready()
            self.plan = reserved(self.scheduler)
            self.worker.ask("hold_copy", plan=self.plan)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.scheduler.kill()
        self.worker.kill()


def lose_socket(halves: Halves) -> None:
    halves.worker.ask("shut_sockets")


def lose_scheduler(halves: Halves) -> None:
    halves.scheduler.kill()


def lose_both(halves: Halves) -> None:
    lose_socket(halves)
    lose_scheduler(halves)


@pytest.mark.parametrize("lose", [lose_socket, lose_scheduler, lose_both])
@pytest.mark.parametrize("end", ["the copy ends", "the worker dies"])
def test_no_extent_is_given_away_while_a_copy_may_run(
    server: ServerProcess, lose: Callable[[Halves], None], end: str
) -> None:
    with Halves(server) as halves, start(server, "other") as other:
        lose(halves)
        gone = lose is not lose_socket
        wait_until(lambda: holds(server)["quarantined"] == gone, "the server has noticed")
        theirs = reserve_all(other, seed=4)
        assert len(theirs["objects"]) == NUM_CHUNKS - len(halves.plan["objects"]), "all the rest"
        assert not overlap(halves.plan, theirs)
        assert other.ask("write", plan=theirs) == len(theirs["objects"])
        other.ask("commit", plan=theirs, written=True)
        loaded = other.ask("lookup", request="r", seed=4, count=len(theirs["objects"]), first=0)
        assert other.ask("count_wrong", plan=loaded) == 0, "although the copy still scribbles"

        if end == "the worker dies":
            halves.worker.kill()
        else:
            halves.worker.ask("release_copy")
            wait_until(lambda: halves.worker.ask("copies") == 0, "the copy has ended")
        # A worker that kept its session says nothing when a copy ends, and another scheduler may take over.
        says_so = end == "the worker dies" or lose is lose_both
        if gone and says_so:
            wait_until(lambda: holds(server)["reservations"] == 0, "what the engine held is free")
        assert holds(server)["reservations"] == (not (gone and says_so))


def test_a_copy_into_extents_of_somebody_else_would_be_seen(server: ServerProcess) -> None:
    with start(server) as engine:
        plan = reserved(engine)
        assert engine.ask("write", plan=plan) == len(plan["objects"])
        assert engine.ask("count_wrong", plan=plan) == 0
        engine.ask("hold_copy", plan=plan)
        engine.ask("release_copy")
        assert engine.ask("count_wrong", plan=plan) == len(plan["objects"])


def test_a_worker_that_lost_its_socket_declares_again_only_after_its_copy(server: ServerProcess) -> None:
    with Halves(server) as halves:
        old = halves.scheduler.ask("attachments")[0]
        lose_socket(halves)
        wait_until(lambda: not server.status()["engines"][0]["ready"], "the server has noticed")
        assert halves.scheduler.ask("lookup", request="r", seed=1, count=1, first=0) is None
        with start(server, "later"):
            assert holds(server)["sessions"] == 3, "without the worker, although another engine has come and is served"
        assert halves.worker.ask("attachments") == [None]
        halves.worker.ask("release_copy")
        halves.worker.wait_ready()
        halves.scheduler.wait_ready()
        new = halves.scheduler.ask("attachments")[0]
        assert new[0] == old[0]
        assert new[1] > old[1]
        assert halves.worker.ask("write", plan=halves.plan) == 0, "the old epoch's plans are stale"
        halves.scheduler.ask("commit", plan=halves.plan, written=False)
        wait_until(lambda: holds(server)["reservations"] == 0, "its scheduler has ended the reservation")


def test_an_orderly_end_frees_at_once_while_the_process_lives(server: ServerProcess) -> None:
    with start(server) as engine:
        leased(engine)
        reserved(engine)
        engine.ask("close")
        wait_until(lambda: holds_nothing(server), "all is free")
        os.kill(engine.pid, 0)


def test_a_stopped_engine_cannot_keep_the_others_from_working(server: ServerProcess) -> None:
    with start(server, "stopped") as engine, start(server, "other") as other:
        engine.ask("store", seed=1, first=0, count=NUM_CHUNKS)
        assert engine.ask("lookup", request="r", seed=1, count=NUM_CHUNKS, first=0)["objects"]
        engine.send(signal.SIGSTOP)
        num_stored = other.ask("store", seed=2, first=0, count=NUM_CHUNKS)
        assert num_stored >= NUM_CHUNKS // 4
        plan = other.ask("lookup", request="r", seed=2, count=num_stored, first=0)
        assert plan["boundary"] > 0
        assert other.ask("count_wrong", plan=plan) == 0
