"""The extent pool: nothing overlaps, nothing is lost, and the arena fills with payload whatever came before."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmosaic.core.types import Extents, pack_extents, unpack_extents
from kvmosaic.memory.extents import GRAIN_BYTES, QUANTUM_BYTES, ExtentPool

KIB = 1 << 10
QUANTUM = 64 * KIB


def pool(quanta: int = 16, quantum_bytes: int = QUANTUM) -> ExtentPool:
    made = ExtentPool(quanta * quantum_bytes, quantum_bytes)
    made.grow(made.capacity_bytes)
    return made


def pieces(extents: Extents | None) -> list[tuple[int, int]]:
    assert extents is not None
    return list(unpack_extents(extents))


def test_whole_quanta_come_lowest_first_and_in_one_piece() -> None:
    made = pool()
    first = made.allocate(3 * QUANTUM)
    assert pieces(first) == [(0, 3 * QUANTUM)]
    assert pieces(made.allocate(QUANTUM)) == [(3 * QUANTUM, QUANTUM)]
    assert first is not None
    made.free(first)
    assert pieces(made.allocate(5 * QUANTUM)) == [(0, 3 * QUANTUM), (4 * QUANTUM, 2 * QUANTUM)]


def test_the_rest_of_an_object_follows_it_when_there_is_room() -> None:
    assert pieces(pool().allocate(QUANTUM + 12 * KIB)) == [(0, QUANTUM + 12 * KIB)]


def test_small_objects_share_a_quantum() -> None:
    made = pool()
    for i in range(4):
        assert pieces(made.allocate(16 * KIB)) in [[(at * 16 * KIB, 16 * KIB)] for at in range(4)], i
    assert pieces(made.allocate(16 * KIB))[0][0] >= QUANTUM


def test_objects_are_rounded_up_to_a_sixteenth_at_most() -> None:
    made = ExtentPool(64 << 20)
    for num_bytes in (1, GRAIN_BYTES, 65_537, 100_000, QUANTUM_BYTES - 1, QUANTUM_BYTES, 3 * QUANTUM_BYTES + 500_001):
        taken = made.round_up(num_bytes)
        assert num_bytes <= taken < num_bytes + max(GRAIN_BYTES, num_bytes / 16)
        assert taken % GRAIN_BYTES == 0


def test_nothing_is_handed_out_above_the_usable_mark() -> None:
    made = ExtentPool(8 * QUANTUM, QUANTUM)
    assert made.allocate(1) is None
    made.grow(2 * QUANTUM + 1)
    assert made.usable_bytes == 2 * QUANTUM
    assert made.allocate(3 * QUANTUM) is None
    made.grow(QUANTUM)
    assert made.usable_bytes == 2 * QUANTUM
    assert pieces(made.allocate(2 * QUANTUM)) == [(0, 2 * QUANTUM)]
    made.grow(100 * QUANTUM)
    assert made.usable_bytes == made.capacity_bytes == 8 * QUANTUM
    assert pieces(made.allocate(6 * QUANTUM)) == [(2 * QUANTUM, 6 * QUANTUM)]
    made.check()


def test_a_capacity_that_is_no_multiple_of_the_quantum_loses_its_end() -> None:
    assert ExtentPool(3 * QUANTUM - 1, QUANTUM).capacity_bytes == 2 * QUANTUM


@pytest.mark.parametrize("quantum_bytes", [0, 2048, 3 * GRAIN_BYTES])
def test_a_quantum_is_a_power_of_two(quantum_bytes: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        ExtentPool(1 << 20, quantum_bytes)


def test_no_object_is_empty() -> None:
    assert pool().allocate(0) is None


def test_all_bytes_come_back_in_one_run() -> None:
    made = pool()
    held = [made.allocate(num_bytes) for num_bytes in (5_000, QUANTUM - 1, 70_001, 3 * QUANTUM + 9_000, 1)]
    for extents in held:
        assert extents is not None
        made.free(extents)
    assert made.used_bytes == 0
    assert pieces(made.allocate(16 * QUANTUM)) == [(0, 16 * QUANTUM)]


def test_the_bulk_is_assembled_from_pieces_when_no_quantum_is_free() -> None:
    made = pool(quanta=4)
    halves = [made.allocate(QUANTUM // 2) for _ in range(8)]
    for extents in halves[::2]:
        assert extents is not None
        made.free(extents)
    found = pieces(made.allocate(2 * QUANTUM))
    assert sorted(size for _, size in found) == [QUANTUM // 2] * 4
    assert made.allocate(1) is None
    made.check()


@pytest.mark.parametrize("seed", range(3))
def test_payload_fills_nine_tenths_for_any_mix_also_after_it_changed(seed: int) -> None:
    """Each phase evicts in random order what the one before left, and fills up with objects of other sizes."""
    rng = random.Random(seed)
    made = pool(quanta=2048)
    held: list[tuple[int, Extents]] = []
    mixes: list[Callable[[], int]] = [
        lambda: rng.randrange(QUANTUM, 2 * QUANTUM),
        lambda: 3 * QUANTUM // 2,
        lambda: QUANTUM + 1,
        lambda: 2 * QUANTUM,
        lambda: rng.choice([QUANTUM + 5_000, 7 * QUANTUM + 40_000, 20 * QUANTUM - 1]),
        lambda: rng.randrange(QUANTUM, 40 * QUANTUM),
    ]
    for mix in mixes:
        for _ in range(600):
            num_bytes = mix()
            while (extents := made.allocate(num_bytes)) is None:
                made.free(held.pop(rng.randrange(len(held)))[1])
            held.append((num_bytes, extents))
        while (extents := made.allocate(num_bytes := mix())) is not None:
            held.append((num_bytes, extents))
        made.check(extents for _, extents in held)
        assert sum(size for size, _ in held) >= 0.9 * made.capacity_bytes


@given(
    quantum_bytes=st.sampled_from([GRAIN_BYTES, 4 * GRAIN_BYTES, QUANTUM]),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 2**30)), max_size=80),
)
@settings(max_examples=200, deadline=None)
def test_pieces_never_overlap_and_always_add_up(quantum_bytes: int, steps: list[tuple[bool, int]]) -> None:
    made = ExtentPool(24 * quantum_bytes, quantum_bytes)
    made.grow(20 * quantum_bytes)
    held: list[Extents] = []
    for store, number in steps:
        if store:
            num_bytes = number % (6 * quantum_bytes) + 1
            free_bytes = made.usable_bytes - made.used_bytes
            extents = made.allocate(num_bytes)
            assert (extents is not None) == (made.round_up(num_bytes) <= free_bytes)
            if extents is not None:
                assert sum(size for _, size in pieces(extents)) == made.round_up(num_bytes)
                held.append(extents)
        elif held:
            made.free(held.pop(number % len(held)))
        made.check(held)
    made.grow(24 * quantum_bytes)
    made.check(held)


def test_check_notices_pieces_that_overlap_or_are_lost() -> None:
    made = pool()
    first, second = made.allocate(QUANTUM), made.allocate(5_000)
    assert first is not None
    assert second is not None
    made.check([first, second])
    with pytest.raises(AssertionError):
        made.check([first])
    with pytest.raises(AssertionError):
        made.check([first, pack_extents([(0, 8192)])])


def test_freeing_twice_is_noticed() -> None:
    made = pool()
    extents = made.allocate(GRAIN_BYTES)
    made.allocate(GRAIN_BYTES)
    assert extents is not None
    made.free(extents)
    with pytest.raises(AssertionError):
        made.free(extents)


def test_alternating_use_does_not_grow_the_books() -> None:
    made = pool(quanta=64)
    for _ in range(10_000):
        extents = made.allocate(3 * QUANTUM)
        assert extents is not None
        made.free(extents)
    assert len(made._quanta._heap) < 200
