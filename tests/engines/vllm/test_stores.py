import numpy as np

from kvmosaic.core.types import BootId, Outcome, pack_extents
from kvmosaic.engines.vllm.stores import find_candidate, plan_store
from kvmosaic.protocol.messages import Reserved
from tests.engines.geometries import full_only, hybrid

DIGESTS = [bytes([chunk]) * 4 for chunk in range(8)]
BOOT = (BootId("boot"), 3)


def tables() -> tuple[list[int], list[int], list[int]]:
    return [1, 2, 3, 4], [0] * 6 + [7, 8], [0, 9]


def wanted(candidate) -> list[int]:
    return np.frombuffer(candidate.chain().wanted, dtype="<u4").tolist()


def test_a_null_block_makes_its_object_unwritable() -> None:
    candidate = find_candidate(hybrid(), (0, 2), DIGESTS, tables(), ({16}, ()))

    assert wanted(candidate) == [0b001, 0b111]


def test_a_state_is_stored_only_where_a_step_ended() -> None:
    full, window, _ = tables()
    candidate = find_candidate(hybrid(), (0, 2), DIGESTS, (full, window, [5, 9]), ({8}, ()))

    assert wanted(candidate) == [0b101, 0b011]


def test_a_state_is_stored_where_the_engine_hands_it_over_and_still_holds_it() -> None:
    of_state = (2, 9, 16)
    relocated = (2, 6, 16)
    of_other_group = (1, 9, 16)

    assert wanted(find_candidate(hybrid(), (1, 2), DIGESTS, tables(), (set(), [of_state]))) == [0b111]
    assert wanted(find_candidate(hybrid(), (1, 2), DIGESTS, tables(), (set(), [relocated]))) == [0b011]
    assert wanted(find_candidate(hybrid(), (1, 2), DIGESTS, tables(), (set(), [of_other_group]))) == [0b011]


def test_the_chain_names_its_parent() -> None:
    chain = find_candidate(hybrid(), (1, 2), DIGESTS, tables(), ({16}, ())).chain()

    assert (chain.first_chunk, chain.parent, chain.digests, chain.digest_bytes) == (1, DIGESTS[0], DIGESTS[1], 4)


def test_granted_objects_find_their_blocks_extents_and_numbers() -> None:
    geometry = hybrid()
    first = find_candidate(geometry, (0, 2), DIGESTS, tables(), ({16}, ()))
    second = find_candidate(geometry, (1, 2), DIGESTS, ([11, 12, 13, 14], [0] * 6 + [17, 18], [0, 19]), ({16}, ()))
    # first: full 0 | full 1, window 1, state 1; second: full 1, window 1, state 1.
    outcomes = [Outcome.PRESENT, Outcome.GRANTED, Outcome.NO_ROOM, Outcome.GRANTED]
    outcomes += [Outcome.GRANTED, Outcome.NOT_WORTH_IT, Outcome.GRANTED]
    pieces = [[(0, 16), (64, 16)], [(128, 16)], [(256, 32)], [(512, 16)]]
    reserved = Reserved(
        1,
        reservation=7,
        outcomes=bytes(outcomes),
        extents=b"".join(pack_extents(of_object) for of_object in pieces),
        extent_counts=np.array([len(of_object) for of_object in pieces], dtype="<u4").tobytes(),
    )

    plan = plan_store(geometry, [first, second], reserved, BOOT)

    assert plan is not None
    assert (plan.reservation, plan.num_objects, plan.boot_id, plan.epoch) == (7, 4, "boot", 3)
    full, state = plan.copies
    assert (full.object_group, state.object_group) == (0, 2)
    assert full.block_ids[0].tolist() == [[3, 4], [13, 14]]
    assert state.block_ids[0].tolist() == [[9], [19]]
    assert full.extents == pack_extents([(0, 16), (64, 16), (256, 32)])
    assert np.frombuffer(full.extent_counts, dtype="<u4").tolist() == [2, 1]
    assert [numbers.tolist() for numbers in plan.numbers] == [[0, 2], [1, 3]]


def test_nothing_granted_is_no_plan() -> None:
    candidate = find_candidate(full_only(), (0, 1), DIGESTS, ([1, 2],), (set(), ()))
    reserved = Reserved(1, 0, bytes([Outcome.PRESENT]), b"", b"")

    assert plan_store(full_only(), [candidate], reserved, BOOT) is None
