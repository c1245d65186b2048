"""The modelled model runner: what one step of the engine reads and writes, in the order of vLLM's V1 runner.

    zero new blocks -> copy blocks -> states step on -> attention writes, then reads -> loads, saves, reports

Owns the memory of every rank and what a runner remembers of a request. It computes nothing: whatever it reads is
compared with what must be there. Steps run in the order in which they were scheduled, on one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvmosaic.testing.pages import Group, Layer, Pages, Use
from kvmosaic.testing.sequences import Ints
from kvmosaic.testing.sequences import Sequence as Truth

WRONG = np.uint64(0x5DEECE66D)


class WrongBytesError(AssertionError):
    """The engine would have read something else than what the tokens stand for."""

    def __init__(self, request: str, group: int, positions: tuple[int, int], why: str) -> None:
        super().__init__(f"{request}: wrong bytes in group {group} at tokens {positions}: {why}")
        self.request = request
        self.group = group
        self.positions = positions


@dataclass(frozen=True, slots=True)
class Part:
    """One request's share of a step, as it was scheduled: tokens [start, start + num_tokens), the last `drafts` of
    them proposed. `fresh`: admitted in this step. `known`: tokens of the request then. `replay_end`: up to there
    only windows that are replayed are written."""

    name: str
    truth: Truth
    start: int
    num_tokens: int
    drafts: tuple[int, ...]
    fresh: bool
    known: int
    replay_end: int
    tables: tuple[Sequence[int], ...]


@dataclass(slots=True)
class Running:
    """What the runner remembers of a request: `valid` tokens computed and kept, `known` tokens in all. The state
    after the last step lies in column `column` + `accepted` - 1."""

    valid: int
    known: int
    replay_start: int
    replay_end: int
    column: int | None = None
    accepted: int = 1


@dataclass(slots=True)
class Span:
    """What a part does: it computes [start, end) for good, then `drafts` tokens of which `accepted` are kept."""

    part: Part
    running: Running
    start: int
    end: int
    accepted: int

    @property
    def valid(self) -> int:
        return self.end + self.accepted

    def state_column(self, block_tokens: int) -> int:
        """Where the state that the step starts from lies."""
        running = self.running
        first = (self.start - 1) // block_tokens if running.column is None else running.column
        return first + running.accepted - 1

    def last_column(self, block_tokens: int) -> int:
        """Where the state of the last token goes; those of drafts follow it."""
        return -(-(self.start + self.part.num_tokens) // block_tokens) - 1

    def leave_state(self, block_tokens: int) -> None:
        """Remember where the next step finds the state."""
        column = self.last_column(block_tokens)
        boundary = self.valid // block_tokens * block_tokens
        moved = boundary >= self.end and boundary // block_tokens - 1 == column
        self.running.column = column
        self.running.accepted = 1 if moved else self.accepted + 1


@dataclass(slots=True)
class Runner:
    """`accept(name, proposed)` says how many of the proposed tokens a model would accept when their values are
    not known before the step. `exact_drafts`: the engine's hashes cover the token after a block, too; otherwise its
    own cache shares the last draft slot of a block between prompts that go on differently."""

    ranks: Sequence[Pages]
    accept: Callable[[str, int], int]
    exact_drafts: bool
    num_checks: int = 0
    _running: dict[str, Running] = field(default_factory=dict)

    def forget(self, names: set[str]) -> None:
        for name in names:
            self._running.pop(name, None)

    def prepare(self, zeroed: Sequence[int], copies: Sequence[tuple[int, int]]) -> None:
        """What happens before the forward pass."""
        for pages in self.ranks:
            if zeroed:
                pages.fill(list(zeroed), 0)
            for source, target in copies:
                pages.copy(source, target)

    def forward(self, parts: Sequence[Part]) -> dict[str, list[int]]:
        """Compute a step; the sampled tokens by request."""
        spans = [self._span(part) for part in parts]
        for pages in self.ranks:
            for span in spans:
                self._step_states(pages, span)
            # A request may share the blocks that another one fills in the same step.
            for span in spans:
                self._write(pages, span)
            for span in spans:
                self._check(pages, span)
        return {span.part.name: self._finish(span) for span in spans}

    def _span(self, part: Part) -> Span:
        if part.fresh:
            replay_start = part.start if part.replay_end else 0
            self._running[part.name] = Running(part.start, part.known, replay_start, part.replay_end)
        running = self._running[part.name]
        start = running.valid
        end = start + part.num_tokens - len(part.drafts)
        if end < running.known:
            assert not part.drafts, f"{part.name}: drafts in the middle of a prompt"
            return Span(part, running, start, end, 0)
        if -1 in part.drafts:
            accepted = 0 if part.fresh else self.accept(part.name, len(part.drafts))
        else:
            truth = part.truth.tokens(end, end + len(part.drafts))
            wrong = [i for i, pair in enumerate(zip(part.drafts, truth, strict=True)) if pair[0] != pair[1]]
            accepted = wrong[0] if wrong else len(part.drafts)
        return Span(part, running, start, end, accepted)

    def _finish(self, span: Span) -> list[int]:
        running = span.running
        running.valid = span.valid
        if span.end < running.known:
            return []
        running.known = span.valid + 1
        return span.part.truth.tokens(span.end, span.valid + 1)

    # States and rings: the step goes on from what the last one left.

    def _step_states(self, pages: Pages, span: Span) -> None:
        """As vLLM's mamba_utils in align mode: the running state lies in the column of the step's last token."""
        part = span.part
        for group in pages.groups:
            if group.use is Use.RING:
                if not part.fresh:
                    self._check_whole(span, group, part.tables[group.number][0])
                write_whole(part.truth, group, part.tables[group.number][0], span.valid)
        groups = [group for group in pages.groups if group.use is Use.STATE]
        for group in groups:
            self._step_state(span, group, part.tables[group.number])
        if groups and pages is self.ranks[-1]:
            span.leave_state(groups[0].block_tokens)

    def _step_state(self, span: Span, group: Group, table: Sequence[int]) -> None:
        if span.start:
            self._check_whole(span, group, table[span.state_column(group.block_tokens)])
        column = span.last_column(group.block_tokens)
        for more in range(len(span.part.drafts) + 1):
            end = span.end + more if more <= span.accepted else None
            write_whole(span.part.truth, group, table[column + more], end)
        boundary = span.valid // group.block_tokens * group.block_tokens
        if boundary >= span.end:
            write_whole(span.part.truth, group, table[boundary // group.block_tokens - 1], boundary)

    def _check_whole(self, span: Span, group: Group, block: int) -> None:
        where = (span.part.name, group.number, (span.start, span.start))
        if block == 0:
            raise WrongBytesError(*where, "there is no block")
        for layer in group.layers:
            self.num_checks += 1
            want = layer.content(span.part.truth.marks(np.array([span.start])))[0]
            if not np.array_equal(layer.view[block, 0], want):
                raise WrongBytesError(*where, f"the state in block {block} of layer {layer.name}")

    # Attention

    def _write(self, pages: Pages, span: Span) -> None:
        part = span.part
        for group in pages.groups:
            if group.use in (Use.STATE, Use.RING):
                continue
            start = span.start if group.replay else max(span.start, span.running.replay_end)
            for layer in group.layers:
                last = -(-(span.start + part.num_tokens) // layer.slot_tokens)
                numbers = np.arange(start // layer.slot_tokens, last)
                blocks = blocks_of(part.tables[group.number], layer, numbers)
                numbers, blocks = numbers[blocks != 0], blocks[blocks != 0]
                ends = (numbers + 1) * layer.slot_tokens
                marks = part.truth.marks(ends + layer.lookahead)
                marks = np.where(ends <= span.valid, marks, marks ^ WRONG)
                layer.view[blocks, numbers % layer.slots] = layer.content(marks)

    def _check(self, pages: Pages, span: Span) -> None:
        part, running = span.part, span.running
        for group in pages.groups:
            if group.use in (Use.STATE, Use.RING):
                continue
            end = span.start if group.replay else max(span.start, span.running.replay_end)
            start = max(0, end - group.memory) if group.use is Use.WINDOW else 0
            if group.replay:
                start = max(start, running.replay_start)
            for layer in group.layers:
                numbers = np.arange(-(-start // layer.slot_tokens), end // layer.slot_tokens)
                if layer.lookahead and not self.exact_drafts:
                    numbers = numbers[(numbers + 1) % layer.slots != 0]
                if len(numbers):
                    self._check_slots(part, group, layer, numbers)

    def _check_slots(self, part: Part, group: Group, layer: Layer, numbers: Ints) -> None:
        blocks = blocks_of(part.tables[group.number], layer, numbers)
        ends = (numbers + 1) * layer.slot_tokens
        if not blocks.all():
            raise wrong_slots(part, group, ends[blocks == 0], "there is no block")
        self.num_checks += len(set(blocks.tolist()))
        want = layer.content(part.truth.marks(ends + layer.lookahead))
        equal = (layer.view[blocks, numbers % layer.slots] == want).all(axis=1)
        if not equal.all():
            raise wrong_slots(part, group, ends[~equal], f"layer {layer.name}, blocks {sorted(set(blocks[~equal]))}")


def blocks_of(table: Sequence[int], layer: Layer, numbers: Ints) -> Ints:
    """The blocks that hold these slots of a layer."""
    return np.asarray(table, dtype=np.int64)[numbers // layer.slots]


def wrong_slots(part: Part, group: Group, ends: Ints, why: str) -> WrongBytesError:
    return WrongBytesError(part.name, group.number, (int(ends[0]) - 1, int(ends[-1])), why)


def write_whole(truth: Truth, group: Group, block: int, end: int | None) -> None:
    """Let a block stand for `end` tokens, None for tokens that nobody keeps. Nothing is written to the null block."""
    if block == 0:
        return
    for layer in group.layers:
        marks = truth.marks(np.array([end or 0]))
        layer.view[block, 0] = layer.content(marks if end is not None else marks ^ WRONG)[0]
