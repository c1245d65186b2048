"""How fast a real server answers over its socket, how fast it starts and how small it is when idle.

    python benchmarks/bench_server.py [--rounds 300]

Exits with 1 when a goal is missed. Every lookup is a hit of the whole prompt, so its lease and all extents travel.
"""

import argparse
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvmosaic.client.connection import Connection
from kvmosaic.core.types import Kind
from kvmosaic.layout.groups import Declaration, Group, Shard
from kvmosaic.protocol.messages import (
    Attach,
    Attached,
    Chain,
    Commit,
    Declare,
    Hit,
    Lookup,
    Mapped,
    Release,
    Reserve,
    Reserved,
    Status,
    StatusReport,
)

TIMEOUT_S = 30.0
DIGEST_BYTES = 32
# chunks of the prompt, goal for the median in milliseconds
LOOKUPS = [(64, 0.3), (8192, 3.0)]
READY_GOAL_S = 1.0
IDLE_GOAL_MB = 100


@contextmanager
def server(path: Path) -> Iterator[tuple[subprocess.Popen[str], float]]:
    """A server process and how long it took to be ready."""
    command = [sys.executable, "-m", "kvmosaic", "server", "--l1-size-gb", "1"]
    started = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--http", "127.0.0.1:0", "--socket", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert "ready" in process.stdout.readline()
    try:
        yield process, time.perf_counter() - started
    finally:
        process.terminate()
        process.wait()


def attach(path: Path) -> tuple[Connection, Connection, int]:
    """Both halves of an engine whose objects have 32 KiB, and its epoch."""
    worker, scheduler = Connection.connect(path), Connection.connect(path)
    worker.hello("worker", "bench", TIMEOUT_S)
    scheduler.hello("scheduler", "bench", TIMEOUT_S)
    declaration = Declaration(0, 1, "bench", (Group(Kind.FULL, 256),), (Shard(32 << 10, 0),), {}, "", 8192, 256)
    worker.request(Declare(0, declaration), TIMEOUT_S)
    reply, fd = worker.request_with_fd(Attach(0), TIMEOUT_S)
    assert isinstance(reply, Attached)
    assert fd is not None
    os.close(fd)
    worker.post(Mapped(0, reply.epoch))
    while not isinstance(attached := scheduler.request(Attach(0), TIMEOUT_S), Attached):
        time.sleep(0.01)
    return worker, scheduler, attached.epoch


def wait_resident(connection: Connection) -> None:
    """Until the whole arena may be used: leases are capped by what is usable."""
    while True:
        status = connection.request(Status(0), TIMEOUT_S)
        assert isinstance(status, StatusReport)
        if status.report["usable_bytes"] == status.report["capacity_bytes"]:
            return
        time.sleep(0.05)


def store(scheduler: Connection, epoch: int, digests: bytes) -> None:
    """Reserve and commit a whole chain."""
    num_chunks = len(digests) // DIGEST_BYTES
    chain = Chain(0, b"", DIGEST_BYTES, digests, struct.pack("<I", 1) * num_chunks)
    reserved = scheduler.request(Reserve(0, epoch, (chain,)), TIMEOUT_S)
    assert isinstance(reserved, Reserved)
    scheduler.post(Commit(0, reserved.reservation, b"\1" * num_chunks))


def lookup_times_ms(scheduler: Connection, epoch: int, digests: bytes, rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        hit = scheduler.request(Lookup(0, epoch, "r", 0, DIGEST_BYTES, digests), TIMEOUT_S)
        times.append((time.perf_counter() - started) * 1e3)
        assert isinstance(hit, Hit)
        assert hit.boundary == len(digests) // DIGEST_BYTES
        scheduler.post(Release(0, "r"))
    return times


def private_mb(pid: int) -> float:
    """Resident memory besides the arena."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(status.split(f"{field}:")[1].split()[0]) for field in ("RssAnon", "RssFile")) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    rounds = parser.parse_args().rounds
    misses = 0

    def report(what: str, value: float, goal: float, unit: str) -> None:
        nonlocal misses
        misses += value > goal
        print(f"{what:<40} {value:8.3f} {unit:<3} goal {goal:g}{'' if value <= goal else '  MISSED'}")

    with tempfile.TemporaryDirectory() as directory, server(Path(directory) / "s.sock") as (process, ready_s):
        report("start until ready", ready_s, READY_GOAL_S, "s")
        report("idle memory besides the arena", private_mb(process.pid), IDLE_GOAL_MB, "MB")
        worker, scheduler, epoch = attach(Path(directory) / "s.sock")
        wait_resident(scheduler)
        for num_chunks, goal_ms in LOOKUPS:
            digests = os.urandom(DIGEST_BYTES * num_chunks)
            store(scheduler, epoch, digests)
            times = lookup_times_ms(scheduler, epoch, digests, rounds)
            report(f"lookup of {num_chunks} chunks, p50", statistics.median(times), goal_ms, "ms")
            print(f"{'':<40} {statistics.quantiles(times, n=20)[-1]:8.3f} ms  p95")
        scheduler.close()
        worker.close()
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
