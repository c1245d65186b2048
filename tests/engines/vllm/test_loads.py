import numpy as np

from kvmosaic.core.types import pack_extents
from kvmosaic.engines.vllm.loads import failing_load, plan_load
from kvmosaic.protocol.messages import Hit
from tests.engines.geometries import full_only, hybrid


def counts(*values: int) -> bytes:
    return np.array(values, dtype="<u4").tobytes()


def hit(boundary: int, firsts: tuple[int, ...]) -> Hit:
    extents = tuple(
        pack_extents((1000 * group + chunk, 16) for chunk in range(first, boundary))
        for group, first in enumerate(firsts)
    )
    return Hit(1, boundary, boundary, firsts, extents, tuple(counts(*[1] * (boundary - first)) for first in firsts))


def tables() -> tuple[list[int], list[int], list[int]]:
    """16 tokens: full 4 blocks, window keeps the last 2 of 8, state the last of 2."""
    return [1, 2, 3, 4], [0] * 6 + [7, 8], [0, 9]


def test_a_load_covers_every_block_of_each_kind() -> None:
    copies = plan_load(hybrid(), hit(2, (0, 1, 1)), tables(), (0, 16))

    assert copies is not None
    assert [copy.block_ids[0].tolist() for copy in copies] == [[[1, 2], [3, 4]], [[7, 8]], [[9]]]
    assert [copy.num_objects for copy in copies] == [2, 1, 1]


def test_blocks_of_the_engines_own_hit_are_left_alone() -> None:
    copies = plan_load(hybrid(), hit(2, (0, 1, 1)), ([1, 2, 3, 4], [0] * 6 + [7, 8], [5, 9]), (12, 16))

    assert copies is not None
    assert copies[0].block_ids[0].tolist() == [[0, 0], [0, 4]]


def test_a_block_that_no_object_covers_fails_the_load() -> None:
    full, window, state = tables()

    assert plan_load(hybrid(), hit(2, (1, 1, 1)), (full, window, state), (0, 16)) is None
    assert plan_load(hybrid(), hit(2, (0, 1, 1)), (full, [0] * 5 + [6, 7, 8], state), (0, 16)) is None
    assert plan_load(hybrid(), hit(2, (0, 1, 1)), (full, window, [5, 9]), (0, 16)) is None
    assert plan_load(hybrid(), hit(2, (0, 1, 1)), (full, window, state), (0, 16)) is not None


def test_blocks_after_the_boundary_are_no_business_of_the_load() -> None:
    full, window, state = tables()
    copies = plan_load(hybrid(), hit(2, (0, 1, 1)), ([*full, 11], [*window, 12], [*state, 13]), (0, 16))

    assert copies is not None
    loaded = {block for copy in copies for ids in copy.block_ids for block in ids.ravel().tolist()}
    assert loaded.isdisjoint({11, 12, 13})


def test_an_engine_that_takes_less_than_offered_gets_what_full_groups_can_give() -> None:
    copies = plan_load(full_only(), hit(2, (0,)), ([1, 2, 3],), (0, 12))

    assert copies is not None
    assert copies[0].block_ids[0].tolist() == [[1, 2], [3, 0]]
    assert plan_load(hybrid(), hit(2, (0, 1, 1)), ([1, 2, 3], [0] * 4 + [7, 8], [0, 9]), (0, 12)) is None


def test_a_failing_load_carries_no_boot_id() -> None:
    assert failing_load("r").boot_id == ""
    assert failing_load("r").copies == ()
