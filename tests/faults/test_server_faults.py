"""What engines notice when the server is absent, mute, stopped, killed and started again: never a long wait."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from kvmosaic.testing.fake_engine import ATTACH_TIMEOUT_S
from tests.faults.processes import EngineProcess, ServerProcess, wait_until

pytestmark = pytest.mark.slow

BUDGET_S, SLOW_BUDGET_S, TOLERANCE_S = 0.05, 0.01, 0.005


def best_of(rounds: int, measure: Any) -> float:
    """The machine may be busy with other things for a moment, but not every time."""
    return min(measure() for _ in range(rounds))


def attached_boot_ids(*engines: EngineProcess) -> set[str | None]:
    return {one and one[0] for engine in engines for one in engine.ask("attachments")}


def maps_arena(engine: EngineProcess) -> int:
    return Path(f"/proc/{engine.pid}/maps").read_text().count("kvmosaic-arena")


def shared_bytes() -> int:
    """Shared memory of the whole machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Shmem:"))


def available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


@pytest.fixture
def engine(server: ServerProcess) -> Any:
    with EngineProcess(server.socket) as process:
        process.wait_ready()
        assert process.ask("store", seed=1, first=0, count=4) == 4
        yield process


def hits(engine: EngineProcess) -> bool:
    plan = engine.ask("lookup", request="probe", seed=1, count=4, first=0)
    engine.ask("release", request="probe")
    return plan is not None and plan["boundary"] == 4 and engine.ask("count_wrong", plan=plan) == 0


def test_a_stopped_server_costs_a_step_its_budget_and_then_nothing(
    server: ServerProcess, engine: EngineProcess
) -> None:
    def first_step_s() -> float:
        wait_until(lambda: engine.ask("time_step", seed=1, num_requests=1) < SLOW_BUDGET_S and hits(engine), "quick")
        server.send(signal.SIGSTOP)
        try:
            return float(engine.ask("time_step", seed=1, num_requests=20))
        finally:
            server.send(signal.SIGCONT)

    took_s = best_of(3, first_step_s)
    assert BUDGET_S <= took_s < BUDGET_S + TOLERANCE_S, "and not twenty times that"


def test_the_breaker_opens_and_closes(server: ServerProcess, engine: EngineProcess) -> None:
    assert hits(engine)
    server.send(signal.SIGSTOP)
    before = engine.ask("counters")
    began, steps = time.monotonic(), []
    while time.monotonic() - began < 2:
        steps.append(engine.ask("time_step", seed=1, num_requests=5))
    after = engine.ask("counters")
    # 0, 0.1, 0.3, 0.7, 1.5 s after the first, each a pause later than the one before.
    assert 3 <= after["deadlines"] - before["deadlines"] <= 6
    assert sorted(steps)[len(steps) // 2] < 0.001, "most steps do not ask at all"
    assert after["waited_s"] - before["waited_s"] < BUDGET_S + 6 * (SLOW_BUDGET_S + TOLERANCE_S)
    server.send(signal.SIGCONT)
    took_s = wait_until(lambda: hits(engine), "hits are back")
    assert took_s < 1.5
    wait_until(lambda: server.status()["leases"] == 0, "no late lease is left")


def test_a_reservation_that_came_too_late_is_aborted(server: ServerProcess, engine: EngineProcess) -> None:
    server.send(signal.SIGSTOP)
    assert engine.ask("reserve", seed=2, first=0, count=4) is None
    server.send(signal.SIGCONT)
    wait_until(lambda: server.status()["counters"]["aborted_objects"] == 4, "it was granted and aborted")
    assert server.status()["reservations"] == 0
    assert server.status()["objects"] == 4


def test_commits_and_releases_outlast_a_stop(server: ServerProcess, engine: EngineProcess) -> None:
    lookup = engine.ask("lookup", request="r", seed=1, count=4, first=0)
    plan = engine.ask("reserve", seed=2, first=0, count=4)
    assert lookup["boundary"] == 4
    server.send(signal.SIGSTOP)
    assert engine.ask("time_step", seed=1, num_requests=1) > 0
    engine.ask("write", plan=plan)
    engine.ask("commit", plan=plan, written=True)
    engine.ask("release", request="r")
    server.send(signal.SIGCONT)
    wait_until(lambda: server.status()["leases"] == 0 and server.status()["objects"] == 8, "both have arrived")


def test_a_killed_server_is_back_within_two_seconds_on_a_new_boot_id(server: ServerProcess) -> None:
    common: dict[str, Any] = {"world": 2}
    with (
        EngineProcess(server.socket, ranks="", **common) as scheduler,
        EngineProcess(server.socket, ranks="0", no_scheduler=True, **common) as first,
        EngineProcess(server.socket, ranks="1", no_scheduler=True, **common) as second,
    ):
        halves = (scheduler, first, second)
        scheduler.wait_ready()
        (old,) = attached_boot_ids(*halves)
        plan = scheduler.ask("reserve", seed=1, first=0, count=4)
        assert first.ask("write", plan=plan) == second.ask("write", plan=plan) == 4
        server.kill()
        server.start()
        took_s = wait_until(lambda: attached_boot_ids(*halves) not in ({old}, {None}, {old, None}), "any is back")
        took_s += wait_until(lambda: len(attached_boot_ids(*halves)) == 1, "all are back on one boot id")
        assert took_s < 2
        assert attached_boot_ids(*halves) == {server.status()["boot_id"]} != {old}
        server.wait_populated()
        for worker in (first, second):
            assert maps_arena(worker) == 1
            assert worker.ask("write", plan=plan) == 0, "a plan of the old boot is stale"
            assert worker.ask("count_wrong", plan=plan) == 4
        new = scheduler.ask("reserve", seed=2, first=0, count=4)
        scheduler.ask("commit", plan=plan, written=True)
        assert scheduler.ask("lookup", request="r", seed=1, count=4, first=0)["boundary"] == 0
        assert server.status()["objects"] == 0, "the old plan's commit ended no reservation of the new server"
        assert first.ask("write", plan=new) == second.ask("write", plan=new) == 4
        scheduler.ask("commit", plan=new, written=True)
        loaded = scheduler.ask("lookup", request="r", seed=2, count=4, first=0)
        assert loaded["boundary"] == 4
        assert first.ask("count_wrong", plan=loaded) == second.ask("count_wrong", plan=loaded) == 0


def test_quick_restarts_are_all_noticed(server: ServerProcess) -> None:
    with EngineProcess(server.socket) as engine:
        seen: set[str] = set()
        for _ in range(5):
            boot_id = server.status()["boot_id"]
            wait_until(lambda boot_id=boot_id: attached_boot_ids(engine) == {boot_id}, "attached")
            seen.add(boot_id)
            server.kill()
            server.start()
        assert len(seen) == 5
        assert maps_arena(engine) <= 1


def test_a_copy_that_runs_while_the_server_dies_ends_before_the_worker_comes_back(server: ServerProcess) -> None:
    with EngineProcess(server.socket) as engine:
        engine.wait_ready()
        engine.ask("hold_copy", plan=engine.ask("reserve", seed=1, first=0, count=4))
        server.kill()
        server.start()
        wait_until(lambda: engine.ask("attachments")[0] is None, "the loss is noticed")
        wait_until(lambda: server.status()["sessions"] == 1, "the scheduler half is there")
        assert maps_arena(engine) == 1, "the copy still runs"
        assert server.status()["engines"][0]["ranks"] == 0
        engine.ask("release_copy")
        engine.wait_ready()
        assert maps_arena(engine) == 1


def restart_with_a_large_arena(tmp_path: Path, size_bytes: int) -> tuple[float, int, int]:
    """Seconds until the new server's arena is whole, and shared memory before the first and after the second."""
    free_before = shared_bytes()
    with (
        ServerProcess(tmp_path / "large.sock", size_bytes / (1 << 30)) as server,
        EngineProcess(server.socket) as engine,
    ):
        engine.wait_ready()
        server.wait_populated(timeout_s=120)
        assert shared_bytes() >= free_before + size_bytes // 2
        server.kill()
        wait_until(lambda: maps_arena(engine) == 0, "the worker has unmapped")
        wait_until(lambda: shared_bytes() < free_before + size_bytes // 2, "the memory is free before a new server")
        server.start()
        engine.wait_ready()
        took_s = server.wait_populated(timeout_s=120)
        return took_s, free_before, shared_bytes()


def test_the_memory_of_a_dead_server_is_free_for_the_next(tmp_path: Path) -> None:
    _, before, after = restart_with_a_large_arena(tmp_path, 1 << 30)
    assert after - before < 3 << 29, "one arena, not two"


@pytest.mark.long
def test_an_arena_larger_than_half_of_the_memory_comes_back(tmp_path: Path) -> None:
    restart_with_a_large_arena(tmp_path, available_bytes() * 6 // 10 >> 20 << 20)


def test_a_socket_that_accepts_but_never_answers_is_like_no_server(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(path))
        mute.listen()
        with EngineProcess(path) as engine:
            mute.accept()[0].close()
            assert not engine.ask("wait_ready", timeout_s=0.1)
            assert best_of(3, lambda: engine.ask("time_step", seed=1, num_requests=100)) < TOLERANCE_S
            mute.close()
            path.unlink()
            with ServerProcess(path):
                assert engine.ask("wait_ready", timeout_s=ATTACH_TIMEOUT_S)


def test_no_server_costs_nothing_and_a_late_one_is_used(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    with EngineProcess(path) as engine:
        assert not engine.ask("wait_ready", timeout_s=0.1)
        assert best_of(3, lambda: engine.ask("time_step", seed=1, num_requests=100)) < TOLERANCE_S
        assert engine.ask("store", seed=1, first=0, count=4) == 0
        with ServerProcess(path) as server:
            took_s = wait_until(lambda: engine.ask("attachments") != [None, None], "attached")
            assert took_s < 1
            engine.wait_ready()
            server.wait_populated()
            assert engine.ask("store", seed=1, first=0, count=4) == 4
