"""Random schedules: which model, which settings, and what happens to its engines in which order. Values only.

Drawn from any `random.Random`, so that a seed gives a schedule again and Hypothesis can shrink one.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, replace
from random import Random

from kvmosaic.testing.geometries import GEOMETRIES
from kvmosaic.testing.planned import Settings
from kvmosaic.testing.requests import IMAGE_TOKENS, Ask


@dataclass(frozen=True, slots=True)
class Add:
    engine: int
    ask: Ask


@dataclass(frozen=True, slots=True)
class Turn:
    """So many steps of every engine."""

    steps: int


@dataclass(frozen=True, slots=True)
class Abort:
    """The nth of the requests that are in the engine."""

    engine: int
    nth: int


@dataclass(frozen=True, slots=True)
class Reset:
    """Drop the engine's own cache; with `running`, preempt what runs to be able to."""

    engine: int
    running: bool


@dataclass(frozen=True, slots=True)
class Evict:
    """Drop every block of the engine's own cache that `seed` picks with this chance."""

    engine: int
    seed: int
    chance: float


@dataclass(frozen=True, slots=True)
class Clear:
    """Forget the model on the server: as the engine (which also resets its own cache) or as an operator."""

    engine: int
    operator: bool


@dataclass(frozen=True, slots=True)
class Pause:
    engine: int
    steps: int


@dataclass(frozen=True, slots=True)
class Slow:
    """The engine's next load takes so many steps."""

    engine: int
    steps: int


@dataclass(frozen=True, slots=True)
class Cut:
    """The engine's sockets are shut in the middle of its next store, while the others go on for a few steps."""

    engine: int


@dataclass(frozen=True, slots=True)
class Reweigh:
    """Every engine gets new weights in place and all caches are cleared, on the server by an operator or by each
    engine: all bytes are others now."""

    operator: bool


@dataclass(frozen=True, slots=True)
class Break:
    """The engine's next load, or all from then on, or its next store, fails on one rank."""

    engine: int
    rank: int
    how: str


@dataclass(frozen=True, slots=True)
class Restart:
    """The server is killed; after so many steps another one stands in its place."""

    steps: int


Event = Add | Turn | Abort | Reset | Evict | Clear | Pause | Slow | Cut | Reweigh | Break | Restart

FAILURES = ("load", "load half-way", "load raises", "loads", "store", "store half-way")


@dataclass(frozen=True, slots=True)
class ServerKind:
    """`--chunk-size`, the arena in MiB, and how many of those nobody else gets."""

    chunk: str
    mib: int = 64
    ballast_mib: int = 0


SERVERS = {
    "small chunks": ServerKind("32"),
    "small chunks, little room": ServerKind("32", 16, 13),
    "chosen chunks": ServerKind("auto"),
}


@dataclass(frozen=True, slots=True)
class Schedule:
    """`stranger`: the last engine's model differs in the hash algorithm alone, and in every byte."""

    seed: int
    geometry: str
    server: str
    settings: Settings
    engines: int
    stranger: bool
    events: tuple[Event, ...]


def draw_schedule(random: Random, seed: int = 0, geometries: Tokens[str] = tuple(GEOMETRIES)) -> Schedule:
    """Draw a schedule; `seed` goes into it for what is random while it runs."""
    name = random.choice(geometries)
    server = random.choice(list(SERVERS))
    settings = _draw_settings(random, name, server)
    engines = random.choice((1, 1, 1, 2))
    stranger = engines == 2 and random.random() < 0.2
    events = _Script(random, engines, settings.max_model_len).draw()
    return Schedule(seed, name, server, settings, engines, stranger, events)


def _draw_settings(random: Random, name: str, server: str) -> Settings:
    geometry = GEOMETRIES[name]
    num_drafts = random.choice((1, 2, 3)) if geometry.draft else random.choice((0, 0, 0, 1, 2, 3))
    match_unit = random.choice((None, None, 8, 16)) if geometry.stateful else None
    tight = random.randint(0, 7) + (8 if match_unit else 0)  # vLLM copies a block per group to go on inside one
    return Settings(
        budget=random.choice((24, 32, 40, 64, 100, 256, 512)),
        spare_blocks=random.choice((200, random.randint(7, 64), tight)),
        max_model_len=320 if server.startswith("small") else 900,
        asynchronous=random.random() < 0.4,
        num_drafts=num_drafts,
        late_save=random.random() < 0.5,
        retention=random.choice((0, 0, None, 64)) if geometry.sparse else 0,
        priority=random.random() < 0.2,
        match_unit=match_unit,
    )


class _Script:
    """Draws the events of one schedule. Prompts share prefixes with earlier ones, or go on from their answers."""

    def __init__(self, random: Random, engines: int, max_tokens: int) -> None:
        self._random = random
        self._engines = engines
        self._max_tokens = max_tokens
        self._asked: list[Ask] = []
        self._events: list[Event] = []

    def draw(self) -> tuple[Event, ...]:
        for _ in range(self._random.randint(3, 10)):
            for _ in range(self._random.choice((1, 1, 2, 3, 6))):
                self._events.append(Add(self._engine(), self._ask()))
            if self._random.random() < 0.4:
                self._events.append(self._trouble())
            self._events.append(Turn(self._random.choice((0, 1, 2, 3, 5, 8, 13, 40))))
        return tuple(self._events)

    def _engine(self) -> int:
        return self._random.randrange(self._engines)

    def _trouble(self) -> Event:
        engine, chance = self._engine(), self._random.random()
        if chance < 0.2:
            return Abort(engine, self._random.randrange(4))
        if chance < 0.32:
            return Reset(engine, self._random.random() < 0.4)
        if chance < 0.5:
            return Evict(engine, self._random.randrange(1 << 16), self._random.choice((0.1, 0.5, 0.9)))
        if chance < 0.58:
            return Clear(engine, self._random.random() < 0.5)
        if chance < 0.63:
            return Pause(engine, self._random.randint(1, 6))
        if chance < 0.78:
            return Slow(engine, self._random.randint(1, 8))
        return self._fault(engine)

    def _fault(self, engine: int) -> Event:
        chance = self._random.random()
        if chance < 0.65:
            return Break(engine, self._random.randrange(2), self._random.choice(FAILURES))
        if chance < 0.8:
            return Cut(engine)
        if chance < 0.92:
            return Reweigh(self._random.random() < 0.5)
        return Restart(self._random.randint(0, 6))

    def _ask(self) -> Ask:
        random = self._random
        max_tokens = random.choice((1, 2, 5, 20, 40))
        ask = Ask(f"r{len(self._asked)}", (), max_tokens, priority=random.randrange(3))
        if self._asked and random.random() < 0.75:
            earlier = random.choice(self._asked)
            ask = replace(ask, salt=earlier.salt, adapter=earlier.adapter, images=earlier.images)
            tokens = self._go_on(earlier)
        else:
            ask = self._dress(ask)
            tokens = []
        tokens += random.choices(range(1, 250), k=self._length())
        ask = replace(ask, tokens=tuple(tokens[: self._max_tokens - max_tokens - 8]))
        ask = replace(ask, images=tuple(i for i in ask.images if i[0] + IMAGE_TOKENS <= len(ask.tokens)))
        self._asked.append(ask)
        return ask

    def _dress(self, ask: Ask) -> Ask:
        chance = self._random.random()
        if chance < 0.1:
            return replace(ask, salt=self._random.choice("ab"))
        if chance < 0.2:
            return replace(ask, adapter=self._random.randint(1, 2))
        if chance < 0.3:
            return replace(ask, images=((self._random.randrange(60), self._random.choice(("cat", "dog"))),))
        return ask

    def _go_on(self, earlier: Ask) -> list[int]:
        how = self._random.random()
        if how < 0.3:
            return list(earlier.tokens)
        if how < 0.6:
            return earlier.sequence().tokens(0, len(earlier.tokens) + earlier.max_tokens)
        kept = self._random.randrange(len(earlier.tokens) + 1)
        return list(earlier.tokens[: kept // 16 * 16 if self._random.random() < 0.7 else kept])

    def _length(self) -> int:
        long = self._max_tokens // 2
        around = self._random.choice((0, 32, 64, 96, 128, 256)) + self._random.choice((-1, 0, 1))
        return max(1, self._random.choice((around, self._random.randint(1, 40), self._random.randint(1, long))))
