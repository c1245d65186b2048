"""The schedule fuzzer finds nothing in many schedules, and finds what is planted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvmosaic.engines.copying import Copier
from kvmosaic.testing import fuzz
from kvmosaic.testing.arenas import Servers
from kvmosaic.testing.geometries import GEOMETRIES
from kvmosaic.testing.play import Counts
from kvmosaic.testing.shrink import shrink
from kvmosaic.testing.workload import Add, Restart, Turn, draw_schedule

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # vLLM warns of what this machine lacks

ROOT = Path(__file__).parents[2]
SOURCES_0_33 = ROOT / ".cache/vllm-0.33.0"
BATCHES, BATCH = 4, 25
LONG_BATCHES, LONG_BATCH = 25, 100


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("fuzz"))
    yield servers
    servers.close()


def play_batch(servers: Servers, seed: int, numbers: range) -> Counts:
    total = Counts()
    for number in numbers:
        total.add(fuzz.play(fuzz.draw(seed, number), servers))
    return total


@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_hundred_schedules_show_no_wrong_byte_no_leak_and_no_stall(servers: Servers, batch: int) -> None:
    total = play_batch(servers, 0, range(batch * BATCH, (batch + 1) * BATCH))

    assert total.schedules == BATCH
    assert total.hits > 0
    assert total.checked_pages > 10_000


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1, LONG_BATCHES + 1))
def test_thousands_of_schedules_do_neither(servers: Servers, seed: int) -> None:
    assert play_batch(servers, seed, range(LONG_BATCH)).schedules == LONG_BATCH


@given(st.randoms(use_true_random=False))
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_schedules_that_hypothesis_can_shrink(servers: Servers, random: Random) -> None:
    fuzz.play(draw_schedule(random), servers)


def test_a_seed_is_a_schedule_and_plays_alike(servers: Servers) -> None:
    chosen = next(s for s in fuzz.schedules(5, 50) if not any(isinstance(event, Restart) for event in s.events))

    assert chosen in list(fuzz.schedules(5, 50))
    assert fuzz.play(chosen, servers) == fuzz.play(chosen, servers)


def test_every_geometry_is_drawn() -> None:
    assert {schedule.geometry for schedule in fuzz.schedules(0, BATCHES * BATCH)} == set(GEOMETRIES)


def test_a_failing_schedule_is_shown_as_a_picture(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Copier, "load", lambda self, plan, stop: True)

    assert fuzz.main(["--schedules", "20", "--seed", "1", "--geometry", "window", "--shrink"]) == 1
    shown = capsys.readouterr().out
    assert "wrong bytes in group" in shown
    assert "[0 16)=" in shown
    assert "again: python -m kvmosaic.testing.fuzz --seed 1 --only" in shown


def test_without_a_finding_the_last_line_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["--schedules", "2", "--seed", "1"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("schedules 2, steps ")
    assert all(word in last for word in ("checked pages", "hits", "preemptions", "aborts", "restarts", "clears"))


def test_shrinking_keeps_what_matters_only() -> None:
    schedule = next(s for s in fuzz.schedules(0, 50) if sum(isinstance(e, Add) for e in s.events) > 5)
    needed = [event for event in schedule.events if isinstance(event, Add)][3]

    small = shrink(schedule, lambda one: any(isinstance(e, Add) and e.ask.name == needed.ask.name for e in one.events))

    assert [type(event) for event in small.events] == [Add]
    assert not any(isinstance(event, Turn) for event in small.events)


@pytest.mark.parametrize("count", [30, pytest.param(400, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
def test_it_finds_nothing_under_vllm_0_33_either(count: int) -> None:
    assert SOURCES_0_33.is_dir(), f"{SOURCES_0_33} is missing; run: make setup"
    path = os.pathsep.join([str(SOURCES_0_33), str(ROOT / "src")])
    command = [sys.executable, "-m", "kvmosaic.testing.fuzz", "--schedules", str(count), "--seed", "33"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.splitlines()[-1].startswith(f"schedules {count}, ")
