"""Real vLLM configurations in our words: which bytes are a block's, what is declared, what is refused and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    RSWASpec,
    SinkFullAttentionSpec,
)

from kvmosaic.core.types import Kind
from kvmosaic.engines.copying import Copier, PageMap
from kvmosaic.engines.vllm.translate import check_geometry, engine_key, groups_of
from kvmosaic.errors import Refused
from kvmosaic.layout.groups import Geometry, Group
from kvmosaic.layout.objects import compose
from tests.engines.memory import Bytes, Store, plan_of
from tests.engines.vllm.planning import (
    MODELS,
    Model,
    Plan,
    compose_all,
    full,
    plan_model,
    register_all,
    speculate,
    state,
    window,
)
from tests.engines.vllm.rawpages import layers_of, storage_of

ALL = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture
def planned(folder: Path, name: str) -> Plan:
    return plan_model(MODELS[name], folder)


def owned_bytes(pages: PageMap, storage: Bytes, block: int) -> npt.NDArray[np.bool_]:
    """Which bytes of the storage are a block's."""
    owned = np.zeros(len(storage), dtype=np.bool_)
    starts = pages.addresses - storage.ctypes.data + block * pages.strides
    for start, length in zip(starts.tolist(), pages.lengths.tolist(), strict=True):
        owned[start : start + length] = True
    return owned


@ALL
def test_a_page_map_covers_exactly_what_the_layers_write(planned: Plan) -> None:
    for registration, config, kv_caches in zip(register_all(planned), planned.workers, planned.kv_caches, strict=True):
        storage = storage_of(kv_caches)
        for group, pages in enumerate(registration.pages):
            for block in (1, 2, config.num_blocks - 1):
                storage[:] = 0
                for layer in layers_of(config, group):
                    kv_caches[layer][block].view(torch.uint8).fill_(0x5A)
                assert ((storage != 0) == owned_bytes(pages, storage, block)).all()


@ALL
def test_a_block_id_owns_its_bytes_whichever_group_has_it(planned: Plan) -> None:
    for registration, kv_caches in zip(register_all(planned), planned.kv_caches, strict=True):
        storage = storage_of(kv_caches)
        owned = [
            np.logical_or.reduce([owned_bytes(pages, storage, block) for pages in registration.pages])
            for block in range(5)
        ]
        assert np.sum(owned, axis=0, dtype=np.uint8).max() == 1


@ALL
def test_objects_carry_every_page_from_one_engine_to_another(planned: Plan) -> None:
    """Pages are written and read through vLLM's own views; an arena of bytes lies between."""
    registrations = register_all(planned)
    geometry = compose([each.declaration for each in registrations], None, True)
    rng = np.random.default_rng(0)
    store = Store(1 << 24, rng)
    copiers = [
        Copier(geometry, rank, each.pages, store.bytes.ctypes.data, len(store.bytes))
        for rank, each in enumerate(registrations)
    ]
    for number, objects in enumerate(geometry.object_groups):
        source = [np.arange(1, 1 + kept, dtype=np.int64)[None] for kept in objects.kept_blocks]
        target = [ids + 20 for ids in source]
        extents = [store.place(objects.object_bytes, pieces=3)]
        for group, ids in zip(objects.groups, source, strict=True):
            fill(planned, geometry, group, ids[0], rng)
            want = read(planned, group, ids[0])
            for copier in copiers:
                assert copier.store(plan_of(number, extents, source), lambda: False).all()
            for copier in copiers:
                assert copier.load(plan_of(number, extents, target), lambda: False)
            assert read(planned, group, ids[0] + 20) == want
            store.bytes[:] ^= 0xFF
            for copier in copiers:
                assert copier.load(plan_of(number, extents, target), lambda: False)
            moved = zip(want, read(planned, group, ids[0] + 20), strict=True)
            assert all(before != after for before, after in moved), "negative control"


def fill(plan: Plan, geometry: Geometry, group: int, blocks: npt.NDArray[np.int64], rng: np.random.Generator) -> None:
    """Random pages; replicas get the same ones, as replicas have."""
    objects = next(each for each in geometry.object_groups if group in each.groups)
    replicated = not objects.writes[-1][objects.groups.index(group)]
    for config, kv_caches in zip(plan.workers, plan.kv_caches, strict=True):
        for layer in layers_of(config, group):
            for block in blocks.tolist():
                page = kv_caches[layer][block].view(torch.uint8)
                if replicated and kv_caches is not plan.kv_caches[0]:
                    page.copy_(plan.kv_caches[0][layer][block].view(torch.uint8))
                else:
                    page.copy_(torch.from_numpy(rng.integers(0, 256, tuple(page.shape), dtype=np.uint8)))


def read(plan: Plan, group: int, blocks: npt.NDArray[np.int64]) -> list[bytes]:
    return [
        kv_caches[layer][block].contiguous().view(torch.uint8).numpy().tobytes()
        for config, kv_caches in zip(plan.workers, plan.kv_caches, strict=True)
        for layer in layers_of(config, group)
        for block in blocks.tolist()
    ]


FULL, WINDOW, STATE = Kind.FULL, Kind.WINDOW, Kind.STATE
EXPECTED: dict[str, tuple[list[Group], int]] = {
    "Llama": ([Group(FULL, 16)], 16),
    "Gemma 3": ([Group(FULL, 16), *[Group(WINDOW, 16, 63)] * 5], 16),
    "Gemma 4": ([Group(FULL, 16), *[Group(WINDOW, 32, 63)] * 4], 16),
    "gpt-oss": ([Group(FULL, 16), Group(WINDOW, 16, 127)], 16),
    "Qwen3-Next": ([Group(FULL, 64), *[Group(STATE, 64)] * 3], 64),
    "DSA": ([Group(FULL, 64)], 64),
    "DeepSeek-V4": (
        [*[Group(WINDOW, 64, 127)] * 2, Group(FULL, 256), Group(WINDOW, 4, 7), Group(WINDOW, 8, 127)],
        4,
    ),
    "DeepSeek-V4.1": (
        [
            *[Group(WINDOW, 64, 127, cacheable=False)] * 2,
            Group(FULL, 256),
            Group(WINDOW, 4, 7),
            Group(WINDOW, 8, 127),
        ],
        4,
    ),
    "GLM with a ring": ([Group(FULL, 128), Group(FULL, 4, cacheable=False)], 128),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_groups_are_declared_as_the_planner_made_them(planned: Plan, name: str) -> None:
    groups, hash_block = EXPECTED[name]
    for registration in register_all(planned):
        assert list(registration.declaration.groups) == groups
        assert registration.declaration.hash_block_tokens == hash_block


@ALL
def test_the_scheduler_sees_the_groups_that_the_workers_declare(planned: Plan) -> None:
    geometry = compose_all(planned)
    assert geometry.groups == groups_of(planned.vllm_config, planned.scheduler)
    check_geometry(geometry, planned.vllm_config, planned.scheduler)
    assert register_all(planned)[-1].engine == engine_key(planned.vllm_config)


def test_a_geometry_of_another_engine_is_refused(folder: Path) -> None:
    llama, gemma = plan_model(MODELS["Llama"], folder), plan_model(MODELS["Gemma 3"], folder)
    with pytest.raises(Refused, match=r"the workers declared groups .* but the scheduler has"):
        check_geometry(compose_all(gemma), llama.vllm_config, llama.scheduler)
    llama.vllm_config.parallel_config.world_size = 2
    with pytest.raises(Refused, match="world size 1, but the scheduler has 2"):
        check_geometry(replace_world(compose_all(gemma)), llama.vllm_config, gemma.scheduler)


def replace_world(geometry: Geometry) -> Geometry:
    fields = {name: getattr(geometry, name) for name in Geometry.__struct_fields__}
    return Geometry(**fields | {"world": 1})


@pytest.mark.parametrize(
    ("name", "stored_by"),
    [
        ("DSA on two ranks", [[0], [0]]),
        ("Kimi on two ranks", [[0, 0, 0, 0], [0, 1, 1, 1]]),
        ("Qwen3-Next on two ranks", [[0, 0, 0, 0], [1, 1, 1, 1]]),
        ("pipeline of two", [[0], [1]]),
    ],
)
def test_pages_that_ranks_replicate_are_stored_once(planned: Plan, stored_by: list[list[int]]) -> None:
    shards = [each.declaration.shards for each in register_all(planned)]
    assert [[shard.stored_by for shard in rank] for rank in shards] == stored_by


def test_layers_that_share_pages_are_not_stored_twice(folder: Path) -> None:
    plan = plan_model(MODELS["Llama"], folder)
    alone = register_all(plan)[0].declaration.shards
    plan.workers[0].kv_cache_groups[0].layer_names.append("sharer")
    plan.kv_caches[0]["sharer"] = plan.kv_caches[0]["f0"]
    assert register_all(plan)[0].declaration.shards == alone


def test_a_window_retains_the_tokens_that_speculation_may_prefill_again(folder: Path) -> None:
    plan = plan_model(MODELS["Gemma 3"], folder)
    group = plan.workers[0].kv_cache_groups[1]
    group.kv_cache_spec = replace(group.kv_cache_spec, extra_retained_tokens=3)
    assert Group(WINDOW, 16, 66) in register_all(plan)[0].declaration.groups


def test_attention_is_served_without_the_engines_own_prefix_cache(folder: Path) -> None:
    plan = plan_model(MODELS["Llama"], folder)
    plan.vllm_config.cache_config.enable_prefix_caching = False
    assert compose_all(plan).groups == (Group(FULL, 16),)


@pytest.mark.parametrize(
    ("flagged", "config", "expected"),
    [
        ({1}, {}, {1}),
        (set(), {}, {0, 1}),  # vLLM then drops a block of every group
        ({1}, {"drop": False}, set()),
    ],
)
def test_groups_with_draft_layers_are_flagged(
    folder: Path, flagged: set[int], config: dict[str, Any], expected: set[int]
) -> None:
    plan = plan_model(MODELS["gpt-oss"], folder)
    plain = compose_all(plan)
    speculate(plan, flagged, **config)
    geometry = compose_all(plan)
    assert {number for number, group in enumerate(geometry.groups) if group.draft} == expected
    assert geometry.groups == groups_of(plan.vllm_config, plan.scheduler)
    assert geometry.namespace != plain.namespace
    speculate(plan, flagged, **config, num_speculative_tokens=3)
    assert compose_all(plan).namespace != geometry.namespace


# Refusals.


@dataclass(frozen=True)
class Own(FullAttentionSpec):
    """A spec that some other package registered."""


def one_group(spec: Any) -> Callable[[Plan], None]:
    def change(plan: Plan) -> None:
        for config in (*plan.workers, plan.scheduler):
            config.kv_cache_groups[0].kv_cache_spec = spec

    return change


def set_parallel(**values: Any) -> Callable[[Plan], None]:
    def change(plan: Plan) -> None:
        for name, value in values.items():
            setattr(plan.vllm_config.parallel_config, name, value)

    return change


def host_pool(plan: Plan) -> None:
    for config in (*plan.workers, plan.scheduler):
        config.kv_cache_groups[0].host_resident = True


def replayssm(plan: Plan) -> None:
    plan.vllm_config.cache_config.use_replayssm = True


SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 128, "dtype": torch.bfloat16}
REFUSALS: dict[str, Callable[[Plan], None]] = {
    "group 0 has a ChunkedLocalAttentionSpec": one_group(ChunkedLocalAttentionSpec(attention_chunk_size=32, **SHAPE)),
    "group 0 has a CrossAttentionSpec": one_group(CrossAttentionSpec(**SHAPE)),
    "group 0 has a EncoderOnlyAttentionSpec": one_group(EncoderOnlyAttentionSpec(**SHAPE)),
    "group 0 has a RSWASpec": one_group(RSWASpec(rswa_window=32, **SHAPE)),
    "group 0 has a SinkFullAttentionSpec": one_group(SinkFullAttentionSpec(sink_len=4, **SHAPE)),
    "group 0 has a HiddenStateCacheSpec": one_group(HiddenStateCacheSpec(**SHAPE)),
    "group 0 has a Own, which is not served": one_group(Own(**SHAPE)),
    "attends non-causally": one_group(full(non_causal=True)),
    "MambaSpec in mode 'none', .* add --enable-prefix-caching": one_group(state(16, 16384, mamba_cache_mode="none")),
    "host pool of its own": host_pool,
    "set --decode-context-parallel-size to 1": set_parallel(decode_context_parallel_size=2),
    "set --prefill-context-parallel-size to 1": set_parallel(prefill_context_parallel_size=2),
    "spans 2 nodes": set_parallel(nnodes=2),
    "drop the flag": replayssm,
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_is_not_served_is_refused_by_both_halves(folder: Path, message: str) -> None:
    plan = plan_model(MODELS["Llama"], folder)
    REFUSALS[message](plan)
    with pytest.raises(Refused, match=message):
        groups_of(plan.vllm_config, plan.scheduler)
    with pytest.raises(Refused, match=message):
        register_all(plan)


def test_a_model_whose_groups_are_all_ephemeral_is_refused(folder: Path) -> None:
    plan = plan_model(MODELS["Llama"], folder)
    plan.workers[0].kv_cache_groups[0].enable_kv_transfer = False
    with pytest.raises(Refused, match="no KV cache group that a prefix cache could keep"):
        register_all(plan)


def test_heads_outside_of_blocks_are_refused_when_groups_cut_pages_differently(folder: Path) -> None:
    specs = {"f0": full(heads=4), "w0": window(64, heads=16)}
    plan = plan_model(Model((specs,)), folder)
    for layout in ("LHBNC", "BHLNC"):
        plan.workers[0].kv_cache_layout = layout
        with pytest.raises(Refused, match=f"layout {layout} .*differ in .heads, states.*VLLM_KV_CACHE_LAYOUT=LBHNC"):
            register_all(plan)


def test_pages_on_a_device_are_refused(folder: Path) -> None:
    plan = plan_model(MODELS["Llama"], folder)
    plan.kv_caches[0] = {name: cache.to("meta") for name, cache in plan.kv_caches[0].items()}
    with pytest.raises(Refused, match="copies CPU tensors in this release, and f0 is on meta"):
        register_all(plan)


def test_pages_in_several_allocations_are_refused(folder: Path) -> None:
    plan = plan_model(MODELS["Llama"], folder)
    plan.kv_caches[0]["f1"] = plan.kv_caches[0]["f1"].clone()
    with pytest.raises(Refused, match="2 allocations"):
        register_all(plan)
