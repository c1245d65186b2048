"""A failing schedule for the eye: what happened, and per request and group which block holds which tokens. Pure.

r3            computed 96 of 130
  0 full      [0 16)=12 [16 32)=13 ...
  1 state     [0 32)=. [32 64)=17 ! [64 96)=18
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvmosaic.testing.runner import WrongBytesError
from kvmosaic.testing.workload import Add, Schedule

if TYPE_CHECKING:
    from kvmosaic.testing.modelled import ModelledEngine
    from kvmosaic.testing.play import Play

MAX_REQUESTS = 12


def describe(schedule: Schedule) -> str:
    """The schedule, one event a line."""
    lines = [
        f"{schedule.engines} engine(s) of geometry {schedule.geometry!r} on a server with {schedule.server}"
        + (", the last one a stranger" if schedule.stranger else ""),
        f"{schedule.settings}",
    ]
    for number, event in enumerate(schedule.events):
        if isinstance(event, Add):
            ask = event.ask
            dress = [f"salt {ask.salt}"] * bool(ask.salt) + [f"adapter {ask.adapter}"] * bool(ask.adapter)
            dress += [f"images {ask.images}"] * bool(ask.images)
            text = f"{ask.name} to engine {event.engine}: {len(ask.tokens)} tokens {_start(ask.tokens)}"
            lines.append(f"{number:3} {text}, {ask.max_tokens} to decode, {', '.join(dress) or 'plain'}")
        else:
            lines.append(f"{number:3} {event}")
    return "\n".join(lines)


def picture(play: Play, error: Exception) -> str:
    """Where every engine stood when it went wrong."""
    lines = [f"at {play.now}"]
    for number, engine in enumerate(play.engines):
        lines.append(f"engine {number}, step {engine.num_steps}")
        for name in list(engine.scheduler.requests)[:MAX_REQUESTS]:
            lines += _request(engine, name, error)
    return "\n".join(lines)


def _request(engine: ModelledEngine, name: str, error: Exception) -> list[str]:
    request = engine.scheduler.requests[name]
    external = engine.external.get(name, 0)
    head = f"  {name:12} computed {request.num_computed_tokens} of {request.num_tokens}, {external} from outside"
    lines = [f"{head}, {request.status.name}, preempted {request.num_preemptions} times"]
    try:
        tables = engine.scheduler.kv_cache_manager.get_block_ids(name)
    except KeyError:  # it holds no blocks
        return lines
    for group, table in zip(engine.runner.ranks[0].groups, tables, strict=True):
        wrong = error.positions if isinstance(error, WrongBytesError) and _is_at(error, name, group.number) else None
        lines.append(f"    {group.number} {group.use.value:8} {_table(table, group.block_tokens, wrong)}")
    return lines


def _is_at(error: WrongBytesError, name: str, group: int) -> bool:
    return error.request == name and error.group == group


def _table(table: Any, block_tokens: int, wrong: tuple[int, int] | None) -> str:
    cells = []
    for column, block in enumerate(table):
        start, end = column * block_tokens, (column + 1) * block_tokens
        mark = " !" if wrong and start < max(wrong[1], wrong[0] + 1) and wrong[0] <= end and block else ""
        cells.append(f"[{start} {end})={block or '.'}{mark}")
    return " ".join(cells)


def _start(tokens: tuple[int, ...]) -> str:
    return " ".join(map(str, tokens[:4])) + " ..."
