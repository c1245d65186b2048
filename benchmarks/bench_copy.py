"""How fast pages move to extents and back, against one warm memcpy of the same bytes on one thread.

    python benchmarks/bench_copy.py [--megabytes 512] [--rounds 31]

Both are measured in turns and compared round by round, since machines drift. Exits with 1 when a goal is missed.
"""

import argparse
import ctypes
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from kvmosaic.core.types import Kind, pack_extents
from kvmosaic.engines.copying import Copier, PageMap, Run
from kvmosaic.engines.plans import CopyPlan
from kvmosaic.layout.groups import Geometry, Group, ObjectGroup
from kvmosaic.memory import arena

KIB, MIB = 1 << 10, 1 << 20
LAYERS = 16
# name, bytes of a page, whether a request's blocks are neighbours, the least ratio that is good enough
CASES = [
    ("64 KiB pages, scattered blocks", 64 * KIB, False, 0.6),
    ("64 KiB pages, neighbouring blocks", 64 * KIB, True, 0.85),
    ("1 MiB pages, scattered blocks", MIB, False, 0.85),
    ("16 KiB pages, scattered blocks", 16 * KIB, False, 0.0),
]


class Bench:
    """One engine's cache of LAYERS regions, one arena, and a plan that moves all of it in objects of 16 blocks."""

    def __init__(self, num_bytes: int, page_bytes: int, neighbours: bool) -> None:
        kept = max(1, 64 * KIB * 16 // page_bytes)
        num_objects = num_bytes // (LAYERS * kept * page_bytes)
        num_blocks = num_objects * kept + 1
        # Plain memory like the engine's own; numpy would ask for huge pages.
        self.pages = np.frombuffer(mmap.mmap(-1, LAYERS * num_blocks * page_bytes), dtype=np.uint8)
        self.pages.fill(1)
        origin = self.pages.ctypes.data
        runs = [Run(origin + layer * num_blocks * page_bytes, page_bytes, page_bytes) for layer in range(LAYERS)]
        page_map = PageMap(runs, num_blocks, range(origin, origin + self.pages.nbytes))
        object_bytes = LAYERS * kept * page_bytes
        self.num_bytes = num_objects * object_bytes
        fd = arena.create(self.num_bytes)
        self.arena = arena.attach(fd, self.num_bytes)
        os.close(fd)
        self.arena.populate(0, self.num_bytes)
        objects = ObjectGroup(Kind.FULL, None, 0, (0,), (kept,), object_bytes, ((0,),), ((True,),))
        geometry = Geometry("bench", bytes(16), 16, (Group(Kind.FULL, 16 // kept or 1),), (objects,), 1, 16)
        self.copier = Copier(geometry, 0, [page_map], self.arena.address, self.num_bytes)
        ids = np.arange(1, num_blocks)
        if not neighbours:
            np.random.default_rng(0).shuffle(ids)
        self.plan = CopyPlan(
            object_group=0,
            num_objects=num_objects,
            extents=b"".join(pack_extents([(number * object_bytes, object_bytes)]) for number in range(num_objects)),
            extent_counts=np.ones(num_objects, dtype="<u4").tobytes(),
            block_ids=(ids.reshape(num_objects, kept).astype(np.int64),),
        )

    def store(self) -> None:
        assert self.copier.store(self.plan, lambda: False).all()

    def load(self) -> None:
        assert self.copier.load(self.plan, lambda: False)

    def memcpy_out(self) -> None:
        ctypes.memmove(self.arena.address, self.pages.ctypes.data, self.num_bytes)

    def memcpy_in(self) -> None:
        ctypes.memmove(self.pages.ctypes.data, self.arena.address, self.num_bytes)


def seconds(action: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


def compare(ours: Callable[[], None], memcpy: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Our median seconds, and the median over rounds of how fast we were against memcpy; the first warms up."""
    pairs = [(seconds(ours), seconds(memcpy)) for _ in range(rounds + 1)][1:]
    return statistics.median(own for own, _ in pairs), statistics.median(other / own for own, other in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=31)
    options = parser.parse_args()
    missed = 0
    for name, page_bytes, neighbours, goal in CASES:
        bench = Bench(options.megabytes * MIB, page_bytes, neighbours)
        for what, ours, memcpy in (
            ("store", bench.store, bench.memcpy_out),
            ("load", bench.load, bench.memcpy_in),
        ):
            ours_s, ratio = compare(ours, memcpy, options.rounds)
            speed = bench.num_bytes / ours_s / 1e9
            verdict = "" if ratio >= goal else f"  MISSED: {goal}"
            missed += ratio < goal
            print(f"{name:36} {what:6} {speed:6.2f} GB/s  {ratio:5.2f} of memcpy{verdict}", flush=True)
        bench.arena.close()
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
