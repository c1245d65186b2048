"""Copies against a naive reference: every byte of the pages, of the arena and of what lies between them."""

from itertools import count, pairwise

import numpy as np
import numpy.typing as npt
import pytest

from kvmosaic.core.types import Kind
from kvmosaic.engines import copying
from kvmosaic.engines.copying import PageMap, Run, first_objects
from kvmosaic.engines.plans import CopyPlan
from kvmosaic.errors import RemoteProtocolError
from kvmosaic.layout.groups import Geometry
from tests.engines.memory import (
    LAYOUTS,
    NUM_BLOCKS,
    Rank,
    Store,
    full,
    geometry_of,
    object_addresses,
    plan_of,
    state,
    window,
)

CHUNK = 16
NUM_OBJECTS = 3


def never() -> bool:
    return False


class Case:
    """Two ranks with one group per layout, group 0 replicated; random plans over all object groups."""

    def __init__(self, seed: int, separate: bool = True) -> None:
        self.rng = np.random.default_rng(seed)
        layouts = [LAYOUTS[0], *LAYOUTS]
        groups = [full(), full(), window(5), window(40), state(CHUNK), full(), window(5)]
        self.ranks = [Rank(layouts, self.rng) for _ in range(2)]
        self.geometry = geometry_of(self.ranks, groups, CHUNK, separate)
        self.store = Store(1 << 17, self.rng)
        self.copiers = [self.store.copier(self.geometry, number, rank) for number, rank in enumerate(self.ranks)]

    def plan(self, object_group: int, nulls: bool) -> tuple[CopyPlan, list[list[tuple[int, int]]]]:
        objects = self.geometry.object_groups[object_group]
        extents = [
            self.store.place(objects.object_bytes, pieces=int(self.rng.integers(1, 6))) for _ in range(NUM_OBJECTS)
        ]
        block_ids = []
        for kept in objects.kept_blocks:
            ids = self.rng.permutation(np.arange(1, NUM_BLOCKS))[: NUM_OBJECTS * kept].reshape(NUM_OBJECTS, kept)
            if self.rng.integers(2):
                ids = np.sort(ids, axis=None).reshape(ids.shape)
            if nulls:
                ids = np.where(self.rng.random(ids.shape) < 0.3, 0, ids)
            block_ids.append(ids.astype(np.int64))
        return plan_of(object_group, extents, block_ids), extents


def naive(case: Case, plan: CopyPlan, extents: list[list[tuple[int, int]]], rank: int, load: bool) -> list[bool]:
    """Copy byte string by byte string; for a store, which objects were complete."""
    objects = case.geometry.object_groups[plan.object_group]
    pages = case.ranks[rank]
    complete = [load or all((ids[number] != 0).all() for ids in plan.block_ids) for number in range(plan.num_objects)]
    for number in np.flatnonzero(complete).tolist():
        addresses = object_addresses(extents[number], objects.object_bytes)
        for position, group in enumerate(objects.groups):
            if not load and not objects.writes[rank][position]:
                continue
            ids = plan.block_ids[position][number]
            blocks = [*ids.tolist()] * len(pages.pieces[group])
            for block, (at, where) in zip(blocks, pages.slices(group, ids), strict=True):
                if block == 0:
                    continue
                start = objects.offsets[rank][position] + at
                arena = addresses[start : start + where.stop - where.start]
                if load:
                    pages.storages[group][where] = case.store.bytes[arena]
                else:
                    case.store.bytes[arena] = pages.storages[group][where]
    return complete


def everything(case: Case) -> list[bytes]:
    return [case.store.bytes.tobytes(), *(storage.tobytes() for rank in case.ranks for storage in rank.storages)]


SEEDS = range(12)


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("load", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_copies_move_exactly_the_bytes_of_the_reference(
    seed: int, load: bool, separate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:  # object by object, as a plan of many large ones is copied
        monkeypatch.setattr(copying, "_SLICE_BYTES", 1)
    fast, slow = Case(seed, separate or seed % 2 == 0), Case(seed, separate or seed % 2 == 0)
    assert everything(fast) == everything(slow)
    for object_group in range(len(fast.geometry.object_groups)):
        plan, _ = fast.plan(object_group, nulls=seed % 3 == 0)
        again, extents = slow.plan(object_group, nulls=seed % 3 == 0)
        assert plan.extents == again.extents
        for rank, copier in enumerate(fast.copiers):
            before = everything(fast)
            if load:
                assert copier.load(plan, never)
                naive(slow, plan, extents, rank, load=True)
            else:
                assert copier.store(plan, never).tolist() == naive(slow, plan, extents, rank, load=False)
            assert everything(fast) == everything(slow)
            moved = plan.block_ids[0].any() and (load or naive(slow, plan, extents, rank, load=False).count(True))
            assert (everything(fast) != before) == bool(moved), "the comparison would see a copy that does nothing"


def test_the_reference_sees_a_single_wrong_byte_of_every_part() -> None:
    """Negative control: one flipped byte anywhere in an object changes some page of some rank."""
    for object_group, objects in enumerate(Case(1).geometry.object_groups):
        for byte in range(0, objects.object_bytes, 37):
            case = Case(1)
            plan, extents = case.plan(object_group, nulls=False)
            for copier in case.copiers:
                copier.load(plan, never)
            before = everything(case)[1:]
            case.store.bytes[object_addresses(extents[1], objects.object_bytes)[byte]] ^= 0xFF
            for copier in case.copiers:
                copier.load(plan, never)
            assert everything(case)[1:] != before


def test_a_round_trip_moves_pages_to_other_blocks() -> None:
    case = Case(3)
    for object_group, objects in enumerate(case.geometry.object_groups):
        plan, extents = case.plan(object_group, nulls=False)
        payload = [contents(case, plan, rank) for rank in range(2)]
        for copier in case.copiers:
            assert copier.store(plan, never).all()
        elsewhere, _ = case.plan(object_group, nulls=False)
        moved = plan_of(object_group, extents, list(elsewhere.block_ids))
        for rank, copier in enumerate(case.copiers):
            assert contents(case, moved, rank) != payload[rank]
            assert copier.load(moved, never)
            want = payload[rank]
            if 0 in objects.groups:  # the replica stands for both ranks
                want = {**want, 0: payload[0][0]}
            assert contents(case, moved, rank) == want


def contents(case: Case, plan: CopyPlan, rank: int) -> dict[int, bytes]:
    """The payload of a plan's blocks, by group."""
    pages = case.ranks[rank]
    return {
        group: b"".join(pages.storages[group][where].tobytes() for row in ids for _, where in pages.slices(group, row))
        for group, ids in zip(case.geometry.object_groups[plan.object_group].groups, plan.block_ids, strict=True)
    }


def test_an_object_with_a_null_block_is_not_stored() -> None:
    case = Case(5)
    plan, _ = case.plan(0, nulls=False)
    plan.block_ids[0][1, 0] = 0
    before = case.store.bytes.copy()
    assert case.copiers[0].store(plan, never).tolist() == [True, False, True]
    second = np.frombuffer(plan.extents, dtype="<u8").reshape(-1, 2)
    counts = np.frombuffer(plan.extent_counts, dtype="<u4").tolist()
    for offset, length in second[counts[0] : counts[0] + counts[1]].tolist():
        assert (case.store.bytes[offset : offset + length] == before[offset : offset + length]).all()


def test_a_stopped_copy_says_so() -> None:
    case = Case(6)
    plan, _ = case.plan(0, nulls=False)
    assert not case.copiers[0].load(plan, lambda: True)
    before = everything(case)
    assert not case.copiers[0].store(plan, lambda: True).any()
    assert everything(case) == before


def test_a_store_that_is_stopped_midway_counts_whole_objects_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_SLICE_BYTES", 1)
    monkeypatch.setattr(copying, "_SPANS_PER_LOOK", 1)
    seen = set()
    for looks in count():
        case = Case(4)
        plan, extents = case.plan(0, nulls=False)
        left = iter(range(looks))
        complete = case.copiers[0].store(plan, lambda: next(left, None) is None).tolist()  # noqa: B023  # called at once
        whole = Case(4)
        again, _ = whole.plan(0, nulls=False)
        assert whole.copiers[0].store(again, never).all()
        object_bytes = case.geometry.object_groups[0].object_bytes
        for number in np.flatnonzero(complete).tolist():
            where = object_addresses(extents[number], object_bytes)
            assert (case.store.bytes[where] == whole.store.bytes[where]).all()
        seen.add(sum(complete))
        if all(complete):
            break
    assert seen == {0, 1, 2, 3}


def test_a_copy_of_nothing_succeeds() -> None:
    case = Case(7)
    kept = case.geometry.object_groups[0].kept_blocks
    plan = plan_of(0, [], [np.zeros((0, blocks), dtype=np.int64) for blocks in kept])
    assert case.copiers[0].load(plan, never)
    assert case.copiers[0].store(plan, never).tolist() == []


def test_the_first_objects_of_a_plan_are_a_plan() -> None:
    case = Case(8)
    plan, extents = case.plan(0, nulls=False)
    part = first_objects(plan, 2)
    assert part.num_objects == 2
    assert part.extents == plan_of(0, extents[:2], list(plan.block_ids)).extents
    assert [ids.tolist() for ids in part.block_ids] == [ids[:2].tolist() for ids in plan.block_ids]
    assert first_objects(plan, 3) is plan
    assert case.copiers[0].part_bytes(part) * 3 == case.copiers[0].part_bytes(plan) * 2


def bad_plans(case: Case) -> dict[str, CopyPlan]:
    plan, extents = case.plan(0, nulls=False)
    arena = len(case.store.bytes)
    kept = plan.block_ids[0].shape[1]

    def with_ids(ids: npt.NDArray[np.int64]) -> CopyPlan:
        return plan_of(0, extents, [ids, *plan.block_ids[1:]])

    def with_extent(offset: int, length: int) -> CopyPlan:
        return plan_of(0, [*extents[:-1], [(offset, length)]], list(plan.block_ids))

    object_bytes = case.geometry.object_groups[0].object_bytes
    return {
        "a block id of group 0 is not in": with_ids(plan.block_ids[0] + NUM_BLOCKS),
        "a block id of group": with_ids(plan.block_ids[0] - NUM_BLOCKS),
        "block ids of shape": with_ids(np.ones((NUM_OBJECTS, kept + 1), dtype=np.int64)),
        "lies outside an arena": with_extent(arena - object_bytes + 1, object_bytes),
        "outside an arena": with_extent((1 << 64) - 1, 2),
        "are shorter than": with_extent(0, object_bytes - 1),
        "do not match its objects": CopyPlan(0, NUM_OBJECTS, b"", plan.extent_counts, plan.block_ids),
        "groups are not those": plan_of(0, extents, list(plan.block_ids[1:])),
        "which does not exist": plan_of(99, extents, list(plan.block_ids)),
        "cut off": CopyPlan(0, NUM_OBJECTS, plan.extents[:-1], plan.extent_counts, plan.block_ids),
    }


@pytest.mark.parametrize("message", bad_plans(Case(9)))
def test_a_plan_that_leaves_its_bounds_moves_nothing(message: str) -> None:
    case = Case(9)
    plan = bad_plans(case)[message]
    before = everything(case)
    for copier in case.copiers:
        with pytest.raises(RemoteProtocolError, match=message):
            copier.load(plan, never)
        with pytest.raises(RemoteProtocolError, match=message):
            copier.store(plan, never)
    assert everything(case) == before


def test_a_geometry_whose_parts_do_not_fit_is_refused() -> None:
    case = Case(10)
    first = case.geometry.object_groups[0]
    short = {name: getattr(first, name) for name in first.__struct_fields__} | {"object_bytes": first.object_bytes - 1}
    object_groups = (type(first)(**short), *case.geometry.object_groups[1:])
    fields = {name: getattr(case.geometry, name) for name in Geometry.__struct_fields__}
    with pytest.raises(RemoteProtocolError, match="ends at byte"):
        case.store.copier(Geometry(**fields | {"object_groups": object_groups}), 1, case.ranks[1])


def test_runs_that_touch_in_every_block_are_one() -> None:
    pages = PageMap([Run(108, 4, 12), Run(100, 4, 12), Run(104, 4, 12)], 4, range(100, 148))
    assert (pages.addresses.tolist(), pages.lengths.tolist(), pages.block_bytes) == ([100], [12], 12)
    apart = PageMap([Run(100, 4, 12), Run(105, 4, 12), Run(109, 3, 8)], 2, range(100, 148))
    assert apart.lengths.tolist() == [4, 4, 3]


def test_a_run_that_leaves_its_storage_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="leaves its storage"):
        PageMap([Run(100, 4, 12)], 4, range(100, 139))


def test_every_layout_is_cut_into_the_expected_pieces() -> None:
    for layout in LAYOUTS:
        rank = Rank([layout], np.random.default_rng(0))
        assert rank.pages[0].lengths.tolist() == [piece.num_bytes for piece in rank.pieces[0]]
        starts = [piece.offset for piece in rank.pieces[0]]
        assert all(before < after for before, after in pairwise(starts))


def test_states_are_known_as_such() -> None:
    case = Case(11)
    kinds = [objects.kind for objects in case.geometry.object_groups]
    plans = [case.plan(number, nulls=False)[0] for number in range(len(kinds))]
    assert [case.copiers[0].is_state(plan) for plan in plans] == [kind is Kind.STATE for kind in kinds]
