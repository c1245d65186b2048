"""Every model that must be served, through vLLM's own planners: its pages go out and come back bit by bit.

One case is a model with its real head counts on some number of ranks; it is tried in all six page layouts. vLLM
refuses the layouts in which a block id would not own its bytes; whatever it plans must make the trip.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec
from vllm.v1.worker.utils import add_kv_sharing_layers_to_kv_cache_groups
from vllm.version import __version_tuple__

from kvmosaic.core.types import Kind
from kvmosaic.engines.copying import Copier, PageMap, Run
from kvmosaic.engines.vllm.translate import check_geometry
from kvmosaic.errors import Refused
from tests.engines.vllm.planning import BF16, Model, Plan, full, plan_model, register_all
from tests.engines.vllm.rawpages import joined, layers_of, page_pieces, spec_of, view_pieces
from tests.engines.vllm.rows import CASES, LAYOUTS, SPLIT, Case, layers
from tests.engines.vllm.trips import Trip
from tests.results import forget, record

SERVED = [(name, layout) for name, case in CASES.items() for layout in case.served]
REFUSED = [(name, layout) for name, case in CASES.items() for layout in LAYOUTS if layout not in case.served]
PLANNER = "planner " + ".".join(str(part) for part in __version_tuple__[:2])
SHARDED = ["Llama on 2 ranks", "Llama on 4 ranks", "Qwen3.6-27B on 2 ranks", "Kimi-Linear on 2 ranks"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def plan_case(case: Case, layout: str, folder: Path) -> Plan:
    """The engine's core, and what its runner adds: sharers, and layers that it does not register."""
    plan = plan_model(replace(case.model, layouts=(layout,)), folder)
    for config, kv_caches in zip(plan.workers, plan.kv_caches, strict=True):
        add_kv_sharing_layers_to_kv_cache_groups(dict(case.sharers), config.kv_cache_groups, set())
        kv_caches |= {layer: kv_caches[target] for layer, target in case.sharers.items()}
        for layer in case.unregistered:
            del kv_caches[layer]
    return plan


@pytest.fixture
def planned(folder: Path, name: str, layout: str) -> Plan:
    return plan_case(CASES[name], layout, folder)


def pages_by_kind(plan: Plan) -> dict[str, tuple[int, int]]:
    return {
        layer[0]: (spec_of(config, group, layer).block_size, spec_of(config, group, layer).page_size_bytes)
        for config in plan.workers
        for group in range(len(config.kv_cache_groups))
        for layer in layers_of(config, group)
    }


@pytest.mark.parametrize(("name", "layout"), SERVED)
def test_pages_come_back_bit_by_bit(planned: Plan, name: str, layout: str) -> None:
    """Also with an arena in which one byte of each object group in turn is wrong, which must be seen."""
    forget(PLANNER, name, layout)
    trip = Trip(planned, CASES[name].num_chunks)
    check_geometry(trip.geometry, planned.vllm_config, planned.scheduler)
    trip.store()
    with pytest.raises(AssertionError, match="wrong bytes"):
        trip.check()
    trip.load()
    assert trip.check() > 0
    for number in range(len(trip.geometry.object_groups)):
        undo = trip.flip_a_byte(number)
        trip.load()
        with pytest.raises(AssertionError, match="wrong bytes"):
            trip.check()
        undo()
    record(PLANNER, name, layout, CASES[name].row, trip.geometry)


@pytest.mark.parametrize("name", ["Gemma 4 31B on 2 ranks", "Qwen3.5-0.8B", "Kimi-Linear on 2 ranks", "DeepSeek-V4"])
def test_merged_object_groups_carry_the_same_pages(folder: Path, name: str) -> None:
    trip = Trip(plan_case(CASES[name], CASES[name].served[0], folder), 1, separate=False)
    assert len(trip.geometry.object_groups) == 1
    trip.store()
    trip.load()
    assert trip.check() > 0


@pytest.mark.parametrize(("name", "layout"), SERVED)
def test_vllms_views_reach_the_pages_of_the_formula_and_no_more(planned: Plan, name: str, layout: str) -> None:
    for config, kv_caches in zip(planned.workers, planned.kv_caches, strict=True):
        for group in range(len(config.kv_cache_groups)):
            for layer in layers_of(config, group):
                if layer not in kv_caches:
                    continue
                for block in (1, config.num_blocks - 1):
                    formula = joined(page_pieces(config, layer, group, block))
                    assert formula == view_pieces(kv_caches[layer], block, config.num_blocks)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.pages])
def test_blocks_and_pages_have_the_sizes_that_vllm_is_known_to_plan(folder: Path, name: str) -> None:
    case = CASES[name]
    found = pages_by_kind(plan_case(case, case.served[0], folder))
    assert {kind: found[kind] for kind in case.pages} == case.pages


@pytest.mark.parametrize(("name", "layout"), REFUSED)
def test_layouts_in_which_a_block_id_would_not_own_its_bytes_are_not_planned(
    folder: Path, name: str, layout: str
) -> None:
    with pytest.raises((ValueError, AssertionError, NotImplementedError)):
        plan_case(CASES[name], layout, folder)


@pytest.mark.parametrize("layout", SPLIT)
@pytest.mark.parametrize("name", ["Gemma 4 31B", "Mamba2", "Qwen3.5-0.8B", "Kimi-Linear"])
def test_we_refuse_them_by_name_should_vllm_ever_plan_one(folder: Path, name: str, layout: str) -> None:
    plan = plan_case(CASES[name], "LBHNC", folder)
    for config in (*plan.workers, plan.scheduler):
        config.kv_cache_layout = layout
    with pytest.raises(Refused, match=f"layout {layout} is not served for groups that differ in .heads, states"):
        register_all(plan)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunked_local_attention_is_planned_by_vllm_and_refused_by_us(folder: Path, layout: str) -> None:
    local = ChunkedLocalAttentionSpec(block_size=16, num_kv_heads=2, head_size=128, dtype=BF16, attention_chunk_size=64)
    plan = plan_model(Model((layers("c", local, 3) | layers("f", full(), 1),), (layout,)), folder)
    with pytest.raises(Refused, match="has a ChunkedLocalAttentionSpec, which is not served"):
        register_all(plan)


def test_what_ranks_replicate_is_stored_once_and_read_by_all(folder: Path) -> None:
    """Every rank's memory differs before, so a rank that read its own copy would be seen."""
    for name in ("DeepSeek V3 on 4 ranks", "DSA, fp8, on 4 ranks", "DeepSeek-V4 on 4 ranks"):
        trip = Trip(plan_case(CASES[name], CASES[name].served[0], folder), 1)
        for objects in trip.geometry.object_groups:
            assert [any(writes) for writes in objects.writes] == [True, False, False, False]
        once = sum(objects.object_bytes for objects in trip.geometry.object_groups)
        alone = compose_bytes(folder, name.removesuffix(" on 4 ranks").removesuffix(","))
        assert once == alone


def compose_bytes(folder: Path, name: str) -> int:
    geometry = Trip(plan_case(CASES[name], CASES[name].served[0], folder), 1).geometry
    return sum(objects.object_bytes for objects in geometry.object_groups)


def test_heads_that_two_ranks_share_are_stored_once_for_both(folder: Path) -> None:
    trip = Trip(plan_case(CASES["two heads on 4 ranks"], "LBHNC", folder), 1)
    (objects,) = trip.geometry.object_groups
    assert objects.writes == ((True,), (False,), (True,), (False,))
    assert objects.offsets[0] == objects.offsets[1] != objects.offsets[2] == objects.offsets[3]


def test_a_group_that_is_empty_on_a_stage_is_moved_by_the_other(folder: Path) -> None:
    empty = {"DeepSeek-V4 on two stages": [1, 2, 3, 4], "Gemma 3 on two stages": [3]}
    for name, groups in empty.items():
        plan = plan_case(CASES[name], CASES[name].served[0], folder)
        first = plan.workers[0]
        assert [g for g in range(len(first.kv_cache_groups)) if not layers_of(first, g)] == groups


def test_pages_of_another_stages_layers_are_none_of_ours(folder: Path) -> None:
    """vLLM 0.32 leaves them in a rank's plan when a group of mixed pages is empty there."""
    plan = plan_case(CASES["DeepSeek-V4 on two stages"], "BLHNC", folder)
    before = [each.declaration for each in register_all(plan)]
    plan.workers[0].kv_cache_tensors = [*plan.workers[0].kv_cache_tensors, *plan.workers[1].kv_cache_tensors]
    assert [each.declaration for each in register_all(plan)] == before


def test_a_tensor_that_no_group_describes_is_refused(folder: Path) -> None:
    """It would be missing after a load, and nobody would notice."""
    plan = plan_case(CASES["DSA, fp8"], "LBHNC", folder)
    plan.kv_caches[0]["i9"] = plan.kv_caches[0]["i0"].clone()
    with pytest.raises(Refused, match="i9 has pages that no KV cache group describes"):
        register_all(plan)


def test_groups_that_are_not_cacheable_are_neither_stored_nor_written(folder: Path) -> None:
    for name, skipped in (("DeepSeek-V4.1", [0, 1]), ("GLM-5.3 with a ring", [1])):
        trip = Trip(plan_case(CASES[name], "BLHNC", folder), 1)
        moved = {group for objects in trip.geometry.object_groups for group in objects.groups}
        assert [group for group in range(len(trip.geometry.groups)) if group not in moved] == skipped
        trip.store()
        trip.load()
        assert trip.check() > 0


def test_layers_that_use_anothers_pages_add_none(folder: Path) -> None:
    case = CASES["Gemma 4 E4B"]
    shared, alone = (plan_case(each, "LBHNC", folder) for each in (case, replace(case, sharers={})))
    assert [each.declaration.shards for each in register_all(shared)] == [
        each.declaration.shards for each in register_all(alone)
    ]
    assert any("shared window" in group.layer_names for group in shared.workers[0].kv_cache_groups)


def test_states_are_one_page_a_chunk_and_windows_their_tail(folder: Path) -> None:
    kept = {}
    for name in ("Qwen3.6-27B", "gpt-oss", "Gemma 3"):
        geometry = Trip(plan_case(CASES[name], "LBHNC", folder), 1).geometry
        kept[name] = {objects.kind: objects.kept_blocks[0] for objects in geometry.object_groups}
    assert kept["Qwen3.6-27B"] == {Kind.FULL: 1, Kind.STATE: 1}
    assert kept["gpt-oss"] == {Kind.FULL: 16, Kind.WINDOW: 8}
    assert kept["Gemma 3"] == {Kind.FULL: 16, Kind.WINDOW: 16}


# Negative controls: what the trip must notice, beyond the flipped bytes above.


@pytest.mark.parametrize("name", SHARDED)
def test_a_swapped_rank_offset_is_noticed(folder: Path, name: str) -> None:
    trip = Trip(plan_case(CASES[name], "LBHNC", folder), 1)
    trip.store()
    swapped = [
        msgspec.structs.replace(objects, offsets=(objects.offsets[1], objects.offsets[0], *objects.offsets[2:]))
        for objects in trip.geometry.object_groups
    ]
    trip.load(trip.copiers(msgspec.structs.replace(trip.geometry, object_groups=tuple(swapped))))
    with pytest.raises(AssertionError, match="wrong bytes"):
        trip.check()


@pytest.mark.parametrize(("name", "layout"), [("Llama", "LHBNC"), ("Qwen3.5-0.8B", "LBHNC"), ("DeepSeek-V4", "BLHNC")])
def test_an_omitted_run_is_noticed(folder: Path, name: str, layout: str) -> None:
    trip = Trip(plan_case(CASES[name], layout, folder), 1)
    for group in range(len(trip.geometry.groups)):
        trip.reset()
        trip.store()
        pages = [without_last_run(each) if g == group else each for g, each in enumerate(trip.registrations[0].pages)]
        trip.load([Copier(trip.geometry, 0, pages, trip.arena.bytes.ctypes.data, len(trip.arena.bytes))])
        with pytest.raises(AssertionError, match="wrong bytes"):
            trip.check()


def without_last_run(pages: PageMap) -> PageMap:
    fields = (pages.addresses.tolist(), pages.lengths.tolist(), pages.strides.tolist())
    runs = [Run(*each) for each in zip(*fields, strict=True)]
    end = max(run.address + pages.num_blocks * run.block_stride for run in runs)
    return PageMap(runs[:-1], pages.num_blocks, range(min(run.address for run in runs), end))


def test_a_write_into_padding_is_noticed(folder: Path) -> None:
    trip = Trip(plan_case(CASES["Qwen3.5-0.8B"], "LBHNC", folder), 1)
    trip.store()
    trip.load()
    config = trip.plan.workers[0]
    group = next(g for g in trip.target if spec_of(config, g, layers_of(config, g)[0]).page_size_bytes and g > 0)
    layer = layers_of(config, group)[0]
    end = page_pieces(config, layer, group, int(trip.target[group][0, 0]))[-1].stop
    trip.check()
    trip.storages[0][end] ^= 0xFF
    with pytest.raises(AssertionError, match="wrong bytes"):
        trip.check()
