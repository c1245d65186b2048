"""vLLM's configuration in our words: groups, page maps, the declaration of a rank; and what is refused, by name.

The only file that knows vLLM's cache specs and the differences between its versions. Pure functions of vLLM's
objects, called once at start: by the worker half with the full configuration and the tensors, by the scheduler half
with its flattened copy, in which a group of mixed page formats shows its first layer only. What follows from a
group's first layer is therefore what both halves can compare; everything else is declared by the workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    compute_layer_kv_cache_shape_bytes,
    iter_layer_specs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvmosaic.core.types import EngineKey, Kind
from kvmosaic.engines.copying import PageMap, Run
from kvmosaic.engines.vllm.identity import describe_engine, describe_pages
from kvmosaic.engines.vllm.options import Options
from kvmosaic.errors import Refused
from kvmosaic.layout.groups import Declaration, Geometry, Group, Shard

# By exact class: a subclass may keep other bytes, or for other tokens, than its parent.
_KINDS: dict[type, Kind] = {
    FullAttentionSpec: Kind.FULL,
    MLAAttentionSpec: Kind.FULL,
    SlidingWindowSpec: Kind.WINDOW,
    SlidingWindowMLASpec: Kind.WINDOW,
    MambaSpec: Kind.STATE,
    CircularBufferSpec: Kind.FULL,  # never cacheable, so its kind does not matter
}


@dataclass(frozen=True, slots=True)
class Registration:
    """What a worker tells the server, and where its own pages are."""

    engine: EngineKey
    declaration: Declaration
    pages: tuple[PageMap, ...]


def register(
    options: Options,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
) -> Registration:
    """Describe this rank to the server. Raises Refused for what is not served."""
    groups = groups_of(vllm_config, kv_cache_config)
    _refuse_aliasing_layout(kv_cache_config)
    pages = _page_maps(kv_cache_config, _storage(kv_cache_config, kv_caches))
    parallel = vllm_config.parallel_config
    rank = parallel.rank % parallel.world_size
    declaration = Declaration(
        rank=rank,
        world=parallel.world_size,
        model=options.model_tag or str(vllm_config.model_config.model),
        groups=groups,
        shards=tuple(
            Shard(block_bytes=page_map.block_bytes, stored_by=rank - rank % _replicas(vllm_config, group))
            for page_map, group in zip(pages, kv_cache_config.kv_cache_groups, strict=True)
        ),
        identity=describe_engine(options, vllm_config, kv_cache_config),
        pages=describe_pages(vllm_config, kv_cache_config, pages),
        max_num_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        hash_block_tokens=hash_block_tokens(vllm_config, kv_cache_config),
    )
    return Registration(engine_key(vllm_config), declaration, pages)


def engine_key(vllm_config: VllmConfig) -> EngineKey:
    """The same in the scheduler and in every worker of one engine, and in no other engine."""
    parallel = vllm_config.parallel_config
    engine = vllm_config.kv_transfer_config.engine_id
    return EngineKey(f"{engine}/{vllm_config.instance_id}/dp{parallel.data_parallel_index}")


def hash_block_tokens(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """How many tokens one of the engine's block hashes covers."""
    return int(kv_cache_config.hash_block_size or vllm_config.cache_config.block_size)


def groups_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[Group, ...]:
    """The engine's groups; the same from a worker's and from the scheduler's configuration.

    Raises Refused for a model or a setting that is not served.
    """
    _refuse_settings(vllm_config)
    draft = _draft_groups(vllm_config, kv_cache_config)
    groups = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        _refuse_group(number, group)
        spec = next(iter(iter_layer_specs(group.kv_cache_spec)))
        groups.append(
            Group(
                kind=_KINDS[type(spec)],
                block_tokens=spec.block_size,
                memory_tokens=_memory_tokens(spec),
                draft=number in draft,
                cacheable=bool(group.enable_kv_transfer and group.kv_cache_spec.prefix_cacheable),
            )
        )
    if not any(group.cacheable for group in groups):
        raise Refused("this model has no KV cache group that a prefix cache could keep")
    return tuple(groups)


def check_geometry(geometry: Geometry, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse a geometry that is not of the engine this scheduler runs."""
    facts: dict[str, tuple[object, object]] = {
        "groups": (geometry.groups, groups_of(vllm_config, kv_cache_config)),
        "world size": (geometry.world, vllm_config.parallel_config.world_size),
        "hash block": (geometry.hash_block_tokens, hash_block_tokens(vllm_config, kv_cache_config)),
    }
    for fact, (declared, seen) in facts.items():
        if declared != seen:
            raise Refused(f"the workers declared {fact} {declared}, but the scheduler has {seen}")


# Refusals.


def _refuse_settings(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    for flag in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, flag, 1)
        if size > 1:
            raise Refused(f"context parallelism is not served: set --{flag.replace('_', '-')} to 1 (it is {size})")
    if parallel.nnodes_within_dp > 1:
        raise Refused(
            f"this engine spans {parallel.nnodes_within_dp} nodes, and one arena cannot; "
            "use data parallelism over nodes, with one server each"
        )
    if getattr(vllm_config.cache_config, "use_replayssm", False):
        raise Refused("states are not written at every step with --use-replayssm; drop the flag")


def _refuse_group(number: int, group: KVCacheGroupSpec) -> None:
    if group.host_resident:
        raise Refused(f"KV cache group {number} lives in a host pool of its own (HiSparse), which is not served")
    specs = list(iter_layer_specs(group.kv_cache_spec))
    for spec in specs:
        name = type(spec).__name__
        if type(spec) not in _KINDS:
            raise Refused(f"KV cache group {number} has a {name}, which is not served")
        if getattr(spec, "non_causal", False):
            raise Refused(f"KV cache group {number} has a {name} that attends non-causally: no prefix is reusable")
        if isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "align":
            raise Refused(
                f"KV cache group {number} has a MambaSpec in mode {spec.mamba_cache_mode!r}, which keeps no state "
                "that could be reused; add --enable-prefix-caching (and --mamba-cache-mode align)"
            )
    kinds = sorted({_KINDS[type(spec)] for spec in specs})
    if len(kinds) > 1:
        raise Refused(f"KV cache group {number} mixes the kinds {', '.join(kinds)}, which is not served")


def _refuse_aliasing_layout(kv_cache_config: KVCacheConfig) -> None:
    """With heads outside of blocks, a block id owns its bytes only if all groups cut their pages alike."""
    layout = _layout(kv_cache_config)
    if layout.is_block_compact:
        return
    shapes = {
        (spec.num_heads, spec.num_states)
        for group in kv_cache_config.kv_cache_groups
        for spec in iter_layer_specs(group.kv_cache_spec)
    }
    if len(shapes) > 1:
        raise Refused(
            f"layout {layout.name} is not served for groups that differ in (heads, states) per page: "
            f"{sorted(shapes)}; set VLLM_KV_CACHE_LAYOUT=LBHNC"
        )


# What differs between vLLM 0.32 and 0.33.


def _memory_tokens(spec: KVCacheSpec) -> int:
    if _KINDS[type(spec)] is not Kind.WINDOW:
        return 0
    if hasattr(spec, "num_retained_tokens"):  # 0.33
        return int(spec.num_retained_tokens)
    return int(spec.sliding_window - 1 + spec.extra_retained_tokens)


def _draft_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> set[int]:
    """The groups whose last matched block vLLM drops, since a draft layer wrote it with the next token's help."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_eagle_block_drop():
        return set()
    if getattr(vllm_config, "num_hash_lookahead_tokens", 0):  # 0.33: the hash covers the next token as well
        return set()
    groups = kv_cache_config.kv_cache_groups
    flagged = {number for number, group in enumerate(groups) if group.is_eagle_group}
    return flagged or set(range(len(groups)))


# Pages.


def _layout(kv_cache_config: KVCacheConfig) -> Any:  # Any: vLLM's classes are untyped here
    return KVCacheLayout[kv_cache_config.kv_cache_layout]


def _replicas(vllm_config: VllmConfig, group: KVCacheGroupSpec) -> int:
    """How many consecutive ranks hold the same bytes of this whole group."""
    tp = vllm_config.parallel_config.tensor_parallel_size
    shards = [getattr(spec, "max_tp_shards", None) or tp for spec in iter_layer_specs(group.kv_cache_spec)]
    return math.gcd(tp, *(max(1, tp // count) for count in shards))


def _storage(kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]) -> range:
    """The addresses of the one allocation that holds every layer."""
    if any(tensor.host_resident for tensor in kv_cache_config.kv_cache_tensors):
        raise Refused("KV pages in a host pool (HiSparse) are not served")
    # A layer that only the planner knows has no tensor; its bytes are in the same allocation.
    described = {layer for tensor in kv_cache_config.kv_cache_tensors for layer in tensor.layers}
    storages: dict[tuple[int, int], str] = {}
    for layer in sorted(kv_caches, key=lambda layer: layer not in described):
        cache = kv_caches[layer]
        if cache.device.type != "cpu":
            raise Refused(f"kvmosaic copies CPU tensors in this release, and {layer} is on {cache.device}")
        storage = cache.untyped_storage()
        place = (storage.data_ptr(), storage.nbytes())
        if place not in storages and layer not in described:  # not another name for pages that are described
            raise Refused(f"{layer} has pages that no KV cache group describes, so they would be missing after a load")
        storages.setdefault(place, layer)
    if len(storages) != 1:
        raise Refused(f"the KV cache has {len(storages)} allocations; kvmosaic serves exactly one")
    (address, num_bytes), *_ = storages
    return range(address, address + num_bytes)


def _page_maps(kv_cache_config: KVCacheConfig, storage: range) -> tuple[PageMap, ...]:
    owner = {
        layer: (number, spec)
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
        for layer, spec in _layer_specs(group)
    }
    runs: list[list[Run]] = [[] for _ in kv_cache_config.kv_cache_groups]
    for tensor in kv_cache_config.kv_cache_tensors:
        for index, layer in enumerate(tensor.layers):
            if layer not in owner:  # of another pipeline stage, where the group is not empty
                continue
            number, spec = owner[layer]
            runs[number].extend(_page_runs(kv_cache_config, tensor, index, spec, storage.start))
    return tuple(PageMap(group, kv_cache_config.num_blocks, storage) for group in runs)


def _layer_specs(group: KVCacheGroupSpec) -> Iterator[tuple[str, KVCacheSpec]]:
    """Every layer with its own spec; layers that share another's pages have the spec of the group."""
    own = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    for layer in group.layer_names:
        yield layer, own.get(layer, group.kv_cache_spec)


def _page_runs(
    kv_cache_config: KVCacheConfig, tensor: KVCacheTensor, index: int, spec: KVCacheSpec, origin: int
) -> list[Run]:
    """The payload of one layer's pages; padding lies after it and is nobody's.

    The page of block b starts at offset + index * layer_stride + b * block_stride. It is one run unless the layout
    puts heads outside of blocks (LHBNC) or of layers (BHLNC); then it is one run per head.
    """
    layout, heads = _layout(kv_cache_config), spec.num_heads
    page = origin + tensor.offset + index * tensor.layer_stride
    payload = math.prod(compute_layer_kv_cache_shape_bytes(spec, 1)[1:])
    if layout.is_block_compact or heads == 1:
        return [Run(page, payload, tensor.block_stride)]
    if layout.is_block_outermost:
        head_stride = len(tensor.layers) * tensor.layer_stride
    else:
        head_stride = kv_cache_config.num_blocks * tensor.block_stride
    return [Run(page + head * head_stride, payload // heads, tensor.block_stride) for head in range(heads)]
