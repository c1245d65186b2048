"""The fold rule against what it stands for: could the engine continue from there?

Two judges that know nothing of reaches: a brute force over the blocks that attention would read and the states that
a step would start from, and vLLM's own search over a block pool with the same contents. An object that is present
puts the blocks that it keeps into the pool.

vLLM may find a boundary inside a chunk, since its unit is a block and ours is a chunk. So ours is its answer
floored to a chunk, a documented loss of less than one chunk; with draft layers it may be a whole one, since vLLM asks
for one block after the boundary and we for a chunk. Ours is never the larger one, but for one case told below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvmosaic.core.types import Kind
from kvmosaic.layout.fold import fold
from kvmosaic.layout.groups import Declaration, Geometry, Group, Shard
from kvmosaic.layout.objects import compose

MAX_CHUNKS = 9


def geometry_of(groups: Sequence[Group], chunk: int, separate: bool = True) -> Geometry:
    declaration = Declaration(
        rank=0,
        world=1,
        model="tiny",
        groups=tuple(groups),
        shards=tuple(Shard(16, 0) for _ in groups),
        identity={},
        pages="",
        max_num_batched_tokens=chunk,
        hash_block_tokens=min(group.block_tokens for group in groups),
    )
    return compose([declaration], chunk, separate)


def held_blocks(geometry: Geometry, present: Sequence[int], first: int, whole: bool = False) -> list[set[int]]:
    """Block columns of each group that the engine has or can load: before chunk `first` its own, then objects'.

    `whole` puts every block of a present chunk there, not just those that its object keeps.
    """
    held = [set(range(first * geometry.chunk_tokens // group.block_tokens)) for group in geometry.groups]
    for number, objects in enumerate(geometry.object_groups):
        for group, kept in zip(objects.groups, objects.kept_blocks, strict=True):
            blocks = geometry.chunk_tokens // geometry.groups[group].block_tokens
            for chunk in (first + i for i, bits in enumerate(present) if bits >> number & 1):
                end = (chunk + 1) * blocks
                held[group] |= set(range(end - (blocks if whole else kept), end))
    return held


def could_continue(group: Group, held: set[int], known_tokens: int, token: int) -> bool:
    """Whether a step that starts at `token` finds what this group must remember.

    A draft layer's page before `token` was written with the help of the token there, so that one must be known too:
    `known_tokens` of the prompt are those whose chunks of this group were seen before.
    """
    if group.draft and known_tokens <= token:
        return False
    if group.kind is Kind.STATE:
        return token // group.block_tokens - 1 in held
    oldest = 0 if group.kind is Kind.FULL else max(0, token - group.memory_tokens)
    return all(position // group.block_tokens in held for position in range(oldest, token))


def brute_force(geometry: Geometry, present: Sequence[int], first: int, limit: int) -> int:
    held = held_blocks(geometry, present, first)

    def known(group: int, boundary: int) -> int:
        """Tokens of the prompt that this group has seen, counted from the boundary on."""
        objects = next(n for n, each in enumerate(geometry.object_groups) if group in each.groups)
        index = boundary - first
        seen = index < len(present) and present[index] >> objects & 1
        return (boundary + bool(seen)) * geometry.chunk_tokens

    def servable(boundary: int) -> bool:
        return all(
            could_continue(each, held[number], known(number, boundary), boundary * geometry.chunk_tokens)
            for number, each in enumerate(geometry.groups)
        )

    return max((boundary for boundary in range(first + 1, limit + 1) if servable(boundary)), default=first)


@st.composite
def group(draw: st.DrawFn, chunk: int, drafts: bool) -> Group:
    kind = draw(st.sampled_from(list(Kind)))
    draft = drafts and kind is not Kind.STATE and draw(st.booleans())
    if kind is Kind.STATE:
        return Group(kind, chunk)
    block = draw(st.sampled_from([size for size in (1, 2, 4, 8) if chunk % size == 0]))
    memory = draw(st.integers(1, 4 * chunk)) if kind is Kind.WINDOW else 0
    return Group(kind, block, memory, draft)


@dataclass(frozen=True)
class Scene:
    geometry: Geometry
    present: list[int]
    first: int
    limit: int


@st.composite
def scenes(draw: st.DrawFn, drafts: bool = True, merged: bool = False) -> Scene:
    chunk = draw(st.sampled_from([4, 8]))
    groups = draw(st.lists(group(chunk, drafts), min_size=1, max_size=6))
    geometry = geometry_of(groups, chunk, separate=not merged)
    everything = (1 << len(geometry.object_groups)) - 1
    mask: st.SearchStrategy[int] = st.integers(0, everything)
    if draw(st.booleans()):  # holes are rare, so that long boundaries are common
        mask = st.one_of(st.just(everything), st.just(everything), st.just(everything), mask)
    present = draw(st.lists(mask, max_size=MAX_CHUNKS))
    first = draw(st.integers(0, 2))
    return Scene(geometry, present, first, draw(st.integers(first, first + len(present) + 1)))


def ours(scene: Scene) -> int:
    return fold(scene.present, scene.first, scene.geometry.object_groups, scene.limit)[0]


@given(scenes())
@settings(max_examples=500, deadline=None)
def test_the_hit_is_the_last_boundary_from_which_the_engine_could_continue(scene: Scene) -> None:
    shared = {key for objects in scene.geometry.object_groups for key in draft_mix(scene.geometry, objects.groups)}
    found = brute_force(scene.geometry, scene.present, scene.first, scene.limit)
    if len(shared) > 1 and found != ours(scene):
        # Groups that share an object share its lookahead, as vLLM decides for all groups of one spec.
        assert ours(scene) < found
        return
    assert ours(scene) == found


def draft_mix(geometry: Geometry, groups: Sequence[int]) -> set[tuple[str, bool]]:
    """Nothing, or what an object group that holds draft layers and others mixes."""
    flags = {geometry.groups[group].draft for group in groups}
    return {("mixed", flag) for flag in flags} if len(flags) > 1 else set()


@given(scenes(merged=True))
@settings(max_examples=300, deadline=None)
def test_merged_object_groups_hit_less_and_never_more(scene: Scene) -> None:
    found = brute_force(scene.geometry, scene.present, scene.first, scene.limit)
    assert ours(scene) <= found


def test_the_brute_force_notices_a_reach_that_is_one_chunk_short() -> None:
    geometry = geometry_of([Group(Kind.FULL, 4), Group(Kind.WINDOW, 4, memory_tokens=9)], 8)
    assert [objects.reach_chunks for objects in geometry.object_groups] == [None, 2]
    present = [0b01, 0b11, 0b01, 0b11]
    assert brute_force(geometry, present, 0, 4) == fold(present, 0, geometry.object_groups, 4)[0] == 0
    short = geometry_of([Group(Kind.FULL, 4), Group(Kind.WINDOW, 4, memory_tokens=8)], 8)
    assert fold(present, 0, short.object_groups, 4)[0] == 4 != brute_force(geometry, present, 0, 4)


# vLLM's own search.


def spec_for(group: Group) -> KVCacheSpec:
    shape: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
    if group.kind is Kind.STATE:
        return MambaSpec(
            block_size=group.block_tokens, shapes=((2, 2),), dtypes=(torch.float32,), mamba_cache_mode="align"
        )
    if group.kind is Kind.WINDOW:
        return SlidingWindowSpec(block_size=group.block_tokens, sliding_window=group.memory_tokens + 1, **shape)
    return FullAttentionSpec(block_size=group.block_tokens, **shape)


class Pool:
    """A block pool of vLLM whose contents are given: hash i is (i + 1) times the hash block."""

    null_block = SimpleNamespace(block_id=0)

    def __init__(self, geometry: Geometry, held: list[set[int]]) -> None:
        self.hash_block_size = geometry.hash_block_tokens
        self._blocks = [group.block_tokens for group in geometry.groups]
        self._held = held

    def get_cached_block(self, block_hash: bytes, groups: list[int]) -> list[Any] | None:
        end = (int.from_bytes(block_hash[-4:], "big") + 1) * self.hash_block_size
        found = [end // self._blocks[group] - 1 in self._held[group] for group in groups]
        return [SimpleNamespace(block_id=end) for _ in groups] if all(found) else None


def vllms_hit(scene: Scene, limit_tokens: int, alignment: int, whole: bool = False) -> int:
    """In tokens. `whole` as in held_blocks; hits inside of a state's block are left out, since no object has them."""
    geometry = scene.geometry
    drafts = any(group.draft for group in geometry.groups)
    groups = [
        KVCacheGroupSpec([f"layer {number}"], spec_for(group), is_eagle_group=group.draft)
        for number, group in enumerate(geometry.groups)
    ]
    config = KVCacheConfig(num_blocks=2, kv_cache_tensors=[], kv_cache_groups=groups)
    config.prefix_cache_retention_interval = 0
    sizes = {"scheduler_block_size": alignment, "hash_block_size": geometry.hash_block_tokens}
    lengths = {"max_model_len": 4096, "max_in_flight_tokens": 64}
    ranks = {"dcp_world_size": 1, "pcp_world_size": 1}
    caching = {"enable_caching": True, "enable_kv_cache_events": False, "allow_partial_hash_hits": False}
    coordinator = get_kv_cache_coordinator(config, use_eagle=drafts, **sizes, **lengths, **ranks, **caching)
    pool = Pool(geometry, held_blocks(geometry, scene.present, scene.first, whole))
    coordinator.block_pool = pool
    for manager in coordinator.single_type_managers:
        manager.block_pool = pool
    num_hashes = (scene.first + len(scene.present) + 2) * geometry.chunk_tokens // geometry.hash_block_tokens
    hashes = [number.to_bytes(32, "big") for number in range(num_hashes)]
    return int(coordinator.find_longest_cache_hit(hashes, limit_tokens)[1])


def unit_tokens(geometry: Geometry) -> int:
    return math.lcm(*(group.block_tokens for group in geometry.groups))


@given(scenes(drafts=False))
@settings(max_examples=300, deadline=None)
def test_without_drafts_the_hit_is_vllms_own_on_boundaries(scene: Scene) -> None:
    chunk = scene.geometry.chunk_tokens
    if len(scene.geometry.groups) > 1:  # vLLM aligns the hits of a single group to its block
        assert vllms_hit(scene, scene.limit * chunk, chunk) == ours(scene) * chunk
    assert vllms_hit(scene, scene.limit * chunk, unit_tokens(scene.geometry)) >= ours(scene) * chunk


@given(scenes(drafts=False), st.data())
@settings(max_examples=200, deadline=None)
def test_of_a_prefix_that_is_all_there_less_than_a_chunk_is_lost(scene: Scene, data: st.DataObject) -> None:
    """The prompt ends at any token, and vLLM may hit at any block before its last token."""
    chunk = scene.geometry.chunk_tokens
    everything = (1 << len(scene.geometry.object_groups)) - 1
    num_tokens = data.draw(st.integers(1, (scene.first + len(scene.present) + 1) * chunk))
    limit = max(scene.first, min(scene.first + len(scene.present), (num_tokens - 1) // chunk))
    full_scene = replace(scene, present=[everything] * len(scene.present), limit=limit)
    theirs = vllms_hit(full_scene, max(num_tokens - 1, scene.first * chunk), unit_tokens(scene.geometry), whole=True)
    assert 0 <= theirs - ours(full_scene) * chunk < chunk


@given(scenes())
@settings(max_examples=200, deadline=None)
def test_with_drafts_the_hit_is_never_larger(scene: Scene) -> None:
    """The prompt goes on for a chunk, so that it is presence that ends the hit and not its length."""
    end = len(scene.present)
    scene = replace(scene, first=0, limit=end)
    chunk, unit = scene.geometry.chunk_tokens, unit_tokens(scene.geometry)
    windows = [each for each in scene.geometry.groups if each.draft and each.kind is Kind.WINDOW]
    assume(all(each.block_tokens == unit for each in windows))  # see the next test
    assert ours(scene) * chunk <= vllms_hit(scene, end * chunk, unit, whole=True)
    everything = replace(scene, present=[(1 << len(scene.geometry.object_groups)) - 1] * end)
    assert 0 <= vllms_hit(everything, end * chunk, unit, whole=True) - ours(everything) * chunk <= chunk


def test_a_draft_window_that_reaches_the_prompts_start_costs_vllm_a_boundary_more() -> None:
    """It aligns such a run before it drops the block and again after it; nothing that attention reads is missing."""
    geometry = geometry_of([Group(Kind.STATE, 4), Group(Kind.WINDOW, 1, 5, draft=True)], 4)
    scene = Scene(geometry, [0b11, 0b11], 0, 2)
    assert vllms_hit(scene, 8, 4, whole=True) == 0
    assert ours(scene) == brute_force(geometry, scene.present, 0, 2) == 1


def test_a_draft_layer_costs_one_chunk_of_a_prefix() -> None:
    """vLLM gives up the last block, and we the last chunk."""
    geometry = geometry_of([Group(Kind.FULL, 4, draft=True), Group(Kind.WINDOW, 4, 7)], 16)
    scene = Scene(geometry, [0b11] * 5, 0, 5)
    assert ours(scene) == 4
    assert vllms_hit(scene, 5 * 16, 4, whole=True) == 5 * 16 - 4


def test_a_rule_with_a_longer_reach_would_be_seen() -> None:
    geometry = geometry_of([Group(Kind.FULL, 4), Group(Kind.WINDOW, 4, memory_tokens=9)], 8)
    scene = Scene(geometry, [0b01, 0b11, 0b11], 0, 3)
    assert vllms_hit(scene, 24, 8) == ours(scene) * 8 == 24
    longer = geometry_of([Group(Kind.FULL, 4), Group(Kind.WINDOW, 4, memory_tokens=17)], 8)
    assert ours(replace(scene, geometry=longer)) * 8 != vllms_hit(scene, 24, 8)
