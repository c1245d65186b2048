"""The schedule fuzzer: `python -m kvmosaic.testing.fuzz --schedules N --seed S`.

Plays random schedules on vLLM's real Scheduler with our connector and real servers. Exits 0 with a last line of
counts, or prints the failing schedule as a picture and exits 1; `--only K` plays one of them again.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM reads both when it is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from rich.console import Console
from rich.progress import Progress

from kvmosaic.testing.arenas import Servers
from kvmosaic.testing.geometries import GEOMETRIES
from kvmosaic.testing.picture import describe, picture
from kvmosaic.testing.play import Counts, Play
from kvmosaic.testing.shrink import shrink
from kvmosaic.testing.workload import Schedule, draw_schedule


def schedules(seed: int, count: int, geometries: Sequence[str] = tuple(GEOMETRIES)) -> Iterator[Schedule]:
    """The schedules of a seed; each can be drawn alone."""
    return (draw(seed, number, geometries) for number in range(count))


def draw(seed: int, number: int, geometries: Sequence[str] = tuple(GEOMETRIES)) -> Schedule:
    one = seed * 1_000_003 + number
    return draw_schedule(Random(one), one, geometries)


class FailedScheduleError(Exception):
    """A schedule that went wrong; the text is the picture."""


def play(schedule: Schedule, servers: Servers) -> Counts:
    """Play one schedule or raise FailedScheduleError."""
    one = Play(schedule, servers)
    try:
        return one.run()
    except Exception as error:
        story = "".join(traceback.format_exception(error, chain=False))
        raise FailedScheduleError(f"{describe(schedule)}\n\n{picture(one, error)}\n\n{story}") from error


def smallest(schedule: Schedule, servers: Servers, failure: FailedScheduleError) -> FailedScheduleError:
    """The failure of the smallest schedule that was found."""

    def fails(candidate: Schedule) -> bool:
        nonlocal failure
        try:
            play(candidate, servers)
        except FailedScheduleError as found:
            failure = found
            return True
        return False

    shrink(schedule, fails)
    return failure


def quiet() -> None:
    """Faults are injected on purpose, and whatever matters raises."""
    logging.getLogger("kvmosaic").setLevel(logging.CRITICAL)
    logging.getLogger("vllm").setLevel(logging.ERROR)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvmosaic.testing.fuzz", description=__doc__)
    parser.add_argument("--schedules", type=int, default=100, help="how many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="play this one of the seed alone")
    parser.add_argument("--shrink", action="store_true", help="make a failing schedule small before it is printed")
    parser.add_argument("--geometry", choices=list(GEOMETRIES), action="append", help="only these")
    options = parser.parse_args(arguments)
    geometries = tuple(options.geometry or GEOMETRIES)
    numbers = range(options.schedules) if options.only is None else [options.only]
    quiet()
    total, console = Counts(), Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="kvmosaic-fuzz-") as folder:
        servers = Servers(Path(folder))
        try:
            with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
                for number in progress.track(numbers, description="schedules"):
                    total.add(play(draw(options.seed, number, geometries), servers))
        except FailedScheduleError as failed:
            failure = smallest(draw(options.seed, number, geometries), servers, failed) if options.shrink else failed
            print(f"schedule {number} of seed {options.seed} failed\n\n{failure}")
            print(f"again: python -m kvmosaic.testing.fuzz --seed {options.seed} --only {number}")
            return 1
        finally:
            servers.close()
    print(total)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server is left
    sys.exit(main())
