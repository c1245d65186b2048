"""Geometries against numbers worked out by hand."""

from typing import Any

import msgspec
import pytest

from kvmosaic.core.types import Kind
from kvmosaic.errors import Refused
from kvmosaic.layout.groups import Declaration, Geometry, Group, Shard
from kvmosaic.layout.objects import compose

FULL_16 = Group(Kind.FULL, 16)
WINDOW_16 = Group(Kind.WINDOW, 16, memory_tokens=127)


def state(block_tokens: int) -> Group:
    return Group(Kind.STATE, block_tokens)


def declare(*groups: Group, rank: int = 0, world: int = 1, **changes: Any) -> Declaration:
    declaration = Declaration(
        rank=rank,
        world=world,
        model="org/model",
        groups=groups,
        shards=tuple(Shard(block_bytes=100 * (g + 1), stored_by=rank) for g in range(len(groups))),
        identity={"dtype": "bf16", "weights": "abc"},
        pages="layer 0: 64 bytes",
        max_num_batched_tokens=8192,
        hash_block_tokens=1,
    )
    return msgspec.structs.replace(declaration, **changes)


def geometry(*groups: Group, chunk_tokens: int | None = None, separate: bool = True) -> Geometry:
    return compose([declare(*groups)], chunk_tokens, separate)


def refusal(*declarations: Declaration, chunk_tokens: int | None = None, separate: bool = True) -> str:
    with pytest.raises(Refused) as refused:
        compose(declarations, chunk_tokens, separate)
    return str(refused.value)


@pytest.mark.parametrize(
    ("blocks", "chunk_tokens"),
    [((16,), 256), ((16, 32), 256), ((256, 64, 8, 4), 256), ((784,), 784), ((48,), 288), ((300, 7), 2100)],
)
def test_without_state_the_chunk_is_the_smallest_multiple_of_all_blocks_from_256_tokens_on(
    blocks: tuple[int, ...], chunk_tokens: int
) -> None:
    assert geometry(*(Group(Kind.FULL, block) for block in blocks)).chunk_tokens == chunk_tokens


@pytest.mark.parametrize("unit", [16, 544, 784])
def test_with_state_the_chunk_is_the_engines_block_itself(unit: int) -> None:
    composed = geometry(Group(Kind.FULL, unit), state(unit))
    assert composed.chunk_tokens == unit
    assert composed.warnings == ()


def test_groups_that_are_not_cacheable_are_skipped_everywhere() -> None:
    scratch = Group(Kind.FULL, 7, cacheable=False)
    composed = geometry(FULL_16, scratch, WINDOW_16)
    assert composed.chunk_tokens == 256
    assert [group.groups for group in composed.object_groups] == [(0,), (2,)]
    assert composed.groups == (FULL_16, scratch, WINDOW_16)
    assert "nothing to store" in refusal(declare(scratch))


def test_a_chunk_size_that_is_a_multiple_is_taken() -> None:
    assert geometry(FULL_16, chunk_tokens=16).chunk_tokens == 16
    assert geometry(FULL_16, chunk_tokens=1024).chunk_tokens == 1024


@pytest.mark.parametrize(("asked", "nearest"), [(256, "use 784,"), (1000, "use 784 or 1568,"), (0, "use 784,")])
def test_a_chunk_size_that_is_no_multiple_is_refused_with_the_nearest_that_are(asked: int, nearest: str) -> None:
    message = refusal(declare(Group(Kind.FULL, 784), state(784)), chunk_tokens=asked)
    assert f"--chunk-size {asked} " in message
    assert "784" in message
    assert nearest in message


def test_a_larger_chunk_on_a_state_model_is_taken_with_a_warning() -> None:
    composed = geometry(Group(Kind.FULL, 544), state(544), chunk_tokens=1088)
    assert composed.chunk_tokens == 1088
    assert "--chunk-size 1088" in composed.warnings[0]
    assert geometry(Group(Kind.FULL, 544), chunk_tokens=1088).warnings == ()


def test_object_groups_are_one_per_kind_and_reach_in_a_fixed_order() -> None:
    composed = geometry(
        Group(Kind.STATE, 256),
        Group(Kind.WINDOW, 16, memory_tokens=513),
        Group(Kind.WINDOW, 16, memory_tokens=257),
        Group(Kind.FULL, 16),
        Group(Kind.WINDOW, 64, memory_tokens=512),
        Group(Kind.FULL, 256),
        Group(Kind.WINDOW, 16, memory_tokens=256),
    )
    found = [(group.kind, group.reach_chunks, group.groups) for group in composed.object_groups]
    assert found == [
        (Kind.FULL, None, (3, 5)),
        (Kind.WINDOW, 1, (6,)),
        (Kind.WINDOW, 2, (2, 4)),
        (Kind.WINDOW, 3, (1,)),
        (Kind.STATE, 1, (0,)),
    ]


@pytest.mark.parametrize(
    ("group", "kept_blocks"),
    [
        (Group(Kind.FULL, 16), 16),
        (Group(Kind.STATE, 256), 1),
        (Group(Kind.STATE, 64), 1),
        (Group(Kind.WINDOW, 16, memory_tokens=127), 8),
        (Group(Kind.WINDOW, 16, memory_tokens=128), 8),
        (Group(Kind.WINDOW, 16, memory_tokens=129), 9),
        (Group(Kind.WINDOW, 16, memory_tokens=255), 16),
        (Group(Kind.WINDOW, 16, memory_tokens=300), 16),
        (Group(Kind.WINDOW, 16, memory_tokens=0), 1),
        (Group(Kind.WINDOW, 256, memory_tokens=1), 1),
    ],
)
@pytest.mark.parametrize("separate", [True, False])
def test_a_chunk_keeps_the_trailing_blocks_that_a_boundary_can_need(
    group: Group, kept_blocks: int, separate: bool
) -> None:
    one = msgspec.structs.replace(declare(group), max_num_batched_tokens=group.block_tokens)
    composed = compose([one], 256, separate)
    assert composed.object_groups[0].kept_blocks == (kept_blocks,)
    assert composed.object_groups[0].object_bytes == 100 * kept_blocks


def test_a_window_of_no_tokens_still_reaches_one_chunk() -> None:
    assert geometry(Group(Kind.WINDOW, 16)).object_groups[0].reach_chunks == 1


def test_draft_layers_make_their_object_group_look_ahead() -> None:
    composed = geometry(FULL_16, Group(Kind.FULL, 16, draft=True), WINDOW_16)
    assert [group.lookahead_chunks for group in composed.object_groups] == [1, 0]


def test_an_object_holds_rank_after_rank_and_group_after_group() -> None:
    groups = (Group(Kind.FULL, 128), Group(Kind.FULL, 256))
    ranks = [
        declare(*groups, rank=0, world=2, shards=(Shard(10, 0), Shard(7, 0))),
        declare(*groups, rank=1, world=2, shards=(Shard(20, 1), Shard(0, 1))),
    ]
    (group,) = compose(ranks[::-1], None, True).object_groups
    assert group.kept_blocks == (2, 1)
    assert group.offsets == ((0, 20), (27, 67))
    assert group.writes == ((True, True), (True, True))
    assert group.object_bytes == 67


def test_replicas_are_stored_once_and_read_by_all() -> None:
    groups = (Group(Kind.FULL, 256), Group(Kind.FULL, 256))
    ranks = [
        declare(*groups, rank=rank, world=4, shards=(Shard(10, rank // 2 * 2), Shard(5, rank))) for rank in range(4)
    ]
    (group,) = compose(ranks, None, True).object_groups
    assert group.offsets == ((0, 10), (0, 15), (20, 30), (20, 35))
    assert group.writes == ((True, True), (False, True), (True, True), (False, True))
    assert group.object_bytes == 2 * 10 + 4 * 5


def test_merged_object_groups_are_one_full_one() -> None:
    groups = (Group(Kind.FULL, 256), Group(Kind.WINDOW, 16, memory_tokens=127, draft=True), state(256))
    composed = compose([declare(*groups, max_num_batched_tokens=300)], None, False)
    (group,) = composed.object_groups
    assert (group.kind, group.reach_chunks, group.lookahead_chunks) == (Kind.FULL, None, 1)
    assert group.groups == (0, 1, 2)
    assert group.kept_blocks == (1, 8, 1)
    assert group.offsets == ((0, 100, 100 + 8 * 200),)


@pytest.mark.parametrize(("budget", "served"), [(543, False), (544, True), (1087, True), (1088, False)])
def test_merged_groups_with_state_need_a_budget_of_one_block(budget: int, served: bool) -> None:
    one = declare(Group(Kind.FULL, 544), state(544), max_num_batched_tokens=budget)
    assert compose([one], None, True).object_groups[1].kind is Kind.STATE
    if served:
        assert len(compose([one], None, False).object_groups) == 1
    else:
        message = refusal(one, separate=False)
        assert f"is {budget};" in message
        assert "--max-num-batched-tokens 544" in message


def test_merged_groups_without_state_take_any_budget() -> None:
    assert len(geometry(FULL_16, WINDOW_16, separate=False).object_groups) == 1


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model": "org/other"}, ("model", "org/model", "org/other")),
        ({"world": 3}, ("world", "2", "3")),
        ({"groups": (WINDOW_16,)}, ("groups", "full", "window")),
        ({"hash_block_tokens": 8}, ("hash_block_tokens", "1", "8")),
        ({"max_num_batched_tokens": 1}, ("max_num_batched_tokens", "8192", "1")),
        ({"identity": {"dtype": "fp8", "weights": "abc"}}, ("dtype", "bf16", "fp8")),
        ({"identity": {"dtype": "bf16"}}, ("weights", "abc", "None")),
    ],
)
def test_ranks_that_disagree_are_refused_with_both_values(changes: dict[str, Any], parts: tuple[str, ...]) -> None:
    ranks = [declare(FULL_16, world=2), declare(FULL_16, rank=1, world=2)]
    assert compose(ranks, None, True).world == 2
    message = refusal(ranks[0], msgspec.structs.replace(ranks[1], **changes))
    for part in ("rank 0", "rank 1", *parts):
        assert part in message


def test_missing_and_doubled_ranks_are_refused() -> None:
    assert "rank 0 was declared twice" in refusal(declare(FULL_16), declare(FULL_16))
    assert "2 ranks but ranks [1]" in refusal(declare(FULL_16, rank=1, world=2))
    assert "no rank" in refusal()


@pytest.mark.parametrize(
    ("shards", "part"),
    [
        ((Shard(1, 0), Shard(1, 0)), "2 shards for 1 groups"),
        ((Shard(-1, 0),), "-1 bytes"),
        ((Shard(1, 1),), "stored by rank 1, but there are 1 ranks"),
        ((Shard(0, 0),), "no bytes"),
    ],
)
def test_shards_that_make_no_sense_are_refused(shards: tuple[Shard, ...], part: str) -> None:
    assert part in refusal(declare(FULL_16, shards=shards))


def test_replicas_that_do_not_fit_what_they_replicate_are_refused() -> None:
    def two(first: Shard, second: Shard) -> list[Declaration]:
        return [declare(FULL_16, rank=rank, world=2, shards=(shard,)) for rank, shard in enumerate((first, second))]

    assert "a replica of 9 bytes" in refusal(*two(Shard(8, 0), Shard(9, 0)))
    assert "which itself is stored by" in refusal(*two(Shard(8, 1), Shard(8, 0)))


def test_blocks_that_make_no_sense_are_refused() -> None:
    assert "block size 0" in refusal(declare(Group(Kind.FULL, 0)))
    assert "remembers -1" in refusal(declare(Group(Kind.WINDOW, 16, memory_tokens=-1)))
    assert "hash block size is 0" in refusal(declare(FULL_16, hash_block_tokens=0))
    assert "hash block size 100" in refusal(declare(FULL_16, hash_block_tokens=100))


def namespace(**changes: Any) -> bytes:
    return compose([declare(FULL_16, **changes)], None, True).namespace


@pytest.mark.parametrize(
    "changes",
    [
        {"identity": {"dtype": "bf16", "weights": "abd"}},
        {"identity": {"dtype": "bf16", "weights": "abc", "extra": ""}},
        {"pages": "layer 0: 65 bytes"},
        {"groups": (Group(Kind.FULL, 32),)},
        {"groups": (Group(Kind.FULL, 16, draft=True),)},
        {"shards": (Shard(101, 0),)},
        {"hash_block_tokens": 2},
    ],
)
def test_any_difference_in_what_makes_bytes_comparable_is_another_namespace(changes: dict[str, Any]) -> None:
    assert namespace(**changes) != namespace()


def test_the_namespace_is_the_same_for_the_same_bytes() -> None:
    assert len(namespace()) == 16
    assert namespace() == namespace(identity={"weights": "abc", "dtype": "bf16"}, max_num_batched_tokens=1)


def test_chunk_size_and_object_group_mode_are_part_of_the_namespace() -> None:
    one = declare(FULL_16)
    spaces = {compose([one], chunk, separate).namespace for chunk in (256, 512) for separate in (True, False)}
    assert len(spaces) == 4
    assert compose([one], 256, True).namespace == compose([one], None, True).namespace


def test_the_order_of_the_ranks_does_not_matter_but_which_rank_holds_what_does() -> None:
    ranks = [declare(FULL_16, rank=rank, world=2, pages=f"rank {rank}") for rank in range(2)]
    swapped = [msgspec.structs.replace(rank, pages=f"rank {1 - rank.rank}") for rank in ranks]
    assert compose(ranks, None, True) == compose(ranks[::-1], None, True)
    assert compose(ranks, None, True).namespace != compose(swapped, None, True).namespace
