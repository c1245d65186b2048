"""Plants each fault and counts the schedules until the fuzzer catches it: python -m tests.mutations.hunt [FAULT ...]

Without arguments it hunts all of them and writes the table in docs/correctness.md. Run it from the repository's root.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import closing
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
DOCUMENT = Path(__file__).parents[2] / "docs/correctness.md"
BEGIN, END = "<!-- planted faults: begin -->", "<!-- planted faults: end -->"
EMPTY = f"# Correctness\n\n{BEGIN}\n{END}\n"


def schedule_of(fault: Fault, number: int) -> Schedule:
    return fault.tune(draw(SEED, number, fault.geometries), Random(number))


def hunt(fault: Fault, limit: int = MAX_SCHEDULES) -> tuple[int, str] | None:
    """How many schedules it took and what was seen first; None when it was not caught."""
    with tempfile.TemporaryDirectory(prefix="kvmosaic-hunt-") as folder:
        program = (str(SERVE), fault.server) if fault.server else ("-m", "kvmosaic")
        with pytest.MonkeyPatch.context() as patch, closing(Servers(Path(folder), program)) as servers:
            fault.plant(patch)
            found = first_failure(fault, range(limit), servers)
        if found is not None:
            number, seen = found
            with closing(Servers(Path(folder) / "control")) as servers:
                alone = first_failure(fault, range(number, number + 1), servers)
            assert alone is None, f"schedule {number} fails without the fault, too: {alone}"
            return number + 1, seen
    return None


def first_failure(fault: Fault, numbers: range, servers: Servers) -> tuple[int, str] | None:
    servers.folder.mkdir(exist_ok=True)
    for number in numbers:
        try:
            play(schedule_of(fault, number), servers)
        except FailedScheduleError as caught:
            return number, str(caught.__cause__).splitlines()[0]
    return None


def section_of(text: str) -> str:
    """The generated part of the document."""
    return text[text.index(BEGIN) : text.index(END)]


def write_table(found: dict[str, tuple[int, str]]) -> None:
    """Replace the generated part of the document."""
    rows = ["| fault | what is wrong | schedules until caught | seen as |", "|---|---|---|---|"]
    for name, (count, seen) in found.items():
        rows.append(f"| {name} | {FAULTS[name].what} | {count} | {seen[:90].split(', blocks')[0]} |")
    text = DOCUMENT.read_text() if DOCUMENT.exists() else EMPTY
    head = f"{len(found)} faults, planted one at a time; written by `python -m tests.mutations.hunt`.\n"
    DOCUMENT.write_text(text.replace(section_of(text), "\n".join([BEGIN, head, *rows, ""])))


def main(names: list[str]) -> int:
    quiet()
    caught: dict[str, tuple[int, str]] = {}
    for name in names or FAULTS:
        began = time.monotonic()
        found = hunt(FAULTS[name])
        if found is not None:
            caught[name] = found
        print(f"{name}: {found or 'MISSED'} ({time.monotonic() - began:.0f} s)", flush=True)
    if not names:
        write_table(caught)
    return 0 if len(caught) == len(names or FAULTS) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
