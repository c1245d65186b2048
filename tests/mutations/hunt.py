"""Plants each fault and counts the schedules until the fuzzer catches it: python -m tests.mutations.hunt [FAULT ...]

Without arguments it hunts all of them and writes the table in docs/correctness.md. Run it from the repository's root.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from random import Random

import pytest

from kvmosaic.testing.arenas import Servers
from kvmosaic.testing.fuzz import FailedScheduleError, draw, play, quiet
from kvmosaic.testing.workload import Schedule
from tests.mutations.planted import FAULTS, Fault

MAX_SCHEDULES = 300
SEED = 77
SERVE = Path(__file__).with_name("serve.py")


def schedule_of(fault: Fault, number: int) -> Schedule:
    return fault.tune(draw(SEED, number, fault.geometries), Random(number))


def hunt(fault: Fault, limit: int = MAX_SCHEDULES) -> tuple[int, str] | None:
    """How many schedules it took and what was seen first; None when it was not caught."""
    program = (str(SERVE), fault.server) if fault.server else ("-m", "kvmosaic")
    with tempfile.TemporaryDirectory(prefix="kvmosaic-hunt-") as folder, pytest.MonkeyPatch.context() as patch:
        servers = Servers(Path(folder), program)
        fault.plant(patch)
        try:
            for number in range(limit):
                play(schedule_of(fault, number), servers)
        except FailedScheduleError as caught:
            return number + 1, str(caught.__cause__).splitlines()[0]
        finally:
            servers.close()
    return None


def main(names: list[str]) -> int:
    quiet()
    missed = 0
    for name in names or FAULTS:
        began = time.monotonic()
        found = hunt(FAULTS[name])
        missed += found is None
        print(f"{name}: {found or 'MISSED'} ({time.monotonic() - began:.0f} s)", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
