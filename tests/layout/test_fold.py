"""The fold rule against its definition, tried on every boundary."""

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmosaic.core.types import Kind
from kvmosaic.layout.fold import fold, needs
from kvmosaic.layout.groups import ObjectGroup


def object_group(kind: Kind, reach: int | None = None, lookahead: int = 0) -> ObjectGroup:
    return ObjectGroup(kind, reach, lookahead, (0,), (1,), 1, ((0,),), ((True,),))


FULL = object_group(Kind.FULL)
STATE = object_group(Kind.STATE, 1)


def window(reach: int, lookahead: int = 0) -> ObjectGroup:
    return object_group(Kind.WINDOW, reach, lookahead)


def servable(present: Sequence[int], first: int, groups: Sequence[ObjectGroup], boundary: int) -> bool:
    def has(g: int, chunk: int) -> bool:
        return chunk - first < len(present) and bool(present[chunk - first] >> g & 1)

    return all(
        has(g, chunk)
        for g, group in enumerate(groups)
        for chunk in range(
            first if group.reach_chunks is None else max(first, boundary - group.reach_chunks),
            boundary + group.lookahead_chunks,
        )
    )


def oracle(present: Sequence[int], first: int, groups: Sequence[ObjectGroup], limit: int) -> tuple[int, int]:
    boundaries = [b for b in range(first + 1, limit + 1) if servable(present, first, groups, b)]
    full = [1 << g for g, group in enumerate(groups) if group.kind is Kind.FULL]
    depth = 0
    while full and depth < len(present) and all(present[depth] & bit for bit in full):
        depth += 1
    return max(boundaries, default=first), first + depth


GROUPS = st.lists(
    st.one_of(
        st.builds(object_group, st.just(Kind.FULL), st.none(), st.integers(0, 1)),
        st.builds(object_group, st.just(Kind.STATE), st.just(1), st.integers(0, 1)),
        st.builds(object_group, st.just(Kind.WINDOW), st.integers(1, 5), st.integers(0, 1)),
    ),
    min_size=1,
    max_size=4,
)


@given(data=st.data(), groups=GROUPS, first=st.integers(0, 3), dense=st.booleans())
@settings(max_examples=300, deadline=None)
def test_the_fold_is_the_largest_servable_boundary(
    data: st.DataObject, groups: list[ObjectGroup], first: int, dense: bool
) -> None:
    everything = (1 << len(groups)) - 1
    mask = st.integers(0, everything)
    if dense:  # holes are rare, so that long boundaries are common
        mask = st.one_of(st.just(everything), st.just(everything), st.just(everything), mask)
    present = data.draw(st.lists(mask, max_size=14))
    limit = data.draw(st.integers(first, first + len(present) + 2))
    assert fold(present, first, groups, limit) == oracle(present, first, groups, limit)


def test_the_oracle_notices_a_wrong_rule() -> None:
    present = [0b111, 0b011, 0b111, 0b111]
    groups = [FULL, window(2), STATE]
    assert fold(present, 0, groups, 4) == oracle(present, 0, groups, 4) == (4, 4)
    assert oracle(present, 0, [FULL, window(4), object_group(Kind.STATE, 3)], 4) != (4, 4)


def test_the_picture_of_the_design_hits_at_the_fourth_boundary() -> None:
    assert fold([0b001, 0b001, 0b011, 0b111], 0, [FULL, window(2), STATE], 4) == (4, 4)


@pytest.mark.parametrize(
    ("present", "limit", "answer"),
    [
        ([1, 1, 1], 3, (3, 3)),
        ([1, 1, 1], 2, (2, 3)),
        ([1, 0, 1], 3, (1, 1)),
        ([0, 1, 1], 3, (0, 0)),
        ([], 3, (0, 0)),
        ([1], 0, (0, 1)),
    ],
)
def test_a_full_group_needs_every_chunk(present: list[int], limit: int, answer: tuple[int, int]) -> None:
    assert fold(present, 0, [FULL], limit) == answer


def test_a_state_is_needed_only_at_the_boundary() -> None:
    assert fold([1, 1, 3, 1, 1], 0, [FULL, STATE], 5) == (3, 5)


def test_full_chunks_go_deeper_than_a_miss() -> None:
    assert fold([1, 1, 1], 0, [FULL, STATE], 3) == (0, 3)


def test_the_engines_own_hit_stands_for_the_chunks_before_it() -> None:
    assert fold([0b11], 7, [FULL, window(4)], 8) == (8, 8)
    assert fold([0b11], 7, [FULL, window(4)], 7) == (7, 8)


def test_draft_layers_need_the_chunk_after_the_boundary() -> None:
    draft = object_group(Kind.FULL, None, 1)
    assert fold([1, 1, 1], 0, [draft], 3) == (2, 3)
    assert fold([1], 0, [draft], 1) == (0, 1)


def test_without_full_groups_nothing_is_said_about_depth() -> None:
    assert fold([0, 0, 1], 4, [STATE], 7) == (7, 4)


def test_a_load_needs_only_the_reach_before_the_boundary() -> None:
    assert needs(FULL, 2, 9) == 2
    assert needs(window(3), 2, 9) == 6
    assert needs(window(30), 2, 9) == 2
    assert needs(STATE, 2, 9) == 8


def test_folding_8192_chunks_takes_well_under_a_millisecond() -> None:
    present = [1] * 8192

    def elapsed_s() -> float:
        start = time.perf_counter()
        assert fold(present, 0, [FULL], 8192) == (8192, 8192)
        return time.perf_counter() - start

    assert min(elapsed_s() for _ in range(20)) < 0.001
