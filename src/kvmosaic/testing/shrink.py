"""Makes a failing schedule small: drops events and simplifies settings while it still fails. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from kvmosaic.testing.workload import Add, Schedule, Turn

Fails = Callable[[Schedule], bool]


def shrink(schedule: Schedule, fails: Fails, budget: int = 200) -> Schedule:
    """The smallest schedule found with so many tries; `fails` plays one and says whether it still goes wrong."""
    tries = 0
    again = True
    while again and tries < budget:
        again = False
        for smaller in _smaller(schedule):
            tries += 1
            if fails(smaller):
                schedule, again = smaller, True
                break
            if tries >= budget:
                break
    return schedule


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    events = schedule.events
    width = len(events) // 2
    while width:
        for start in range(len(events) - width, -1, -width):
            yield replace(schedule, events=events[:start] + events[start + width :])
        width //= 2
    settings = schedule.settings
    for simpler in (
        replace(settings, asynchronous=False),
        replace(settings, late_save=False),
        replace(settings, priority=False),
        replace(settings, num_drafts=min(1, settings.num_drafts)),
        replace(settings, retention=0),
    ):
        if simpler != settings:
            yield replace(schedule, settings=simpler)
    for number, event in enumerate(events):
        if isinstance(event, Turn) and event.steps > 1:
            yield _with(schedule, number, Turn(event.steps // 2))
        if isinstance(event, Add) and event.ask.max_tokens > 1:
            yield _with(schedule, number, replace(event, ask=replace(event.ask, max_tokens=event.ask.max_tokens // 2)))


def _with(schedule: Schedule, number: int, event: Add | Turn) -> Schedule:
    return replace(schedule, events=(*schedule.events[:number], event, *schedule.events[number + 1 :]))
