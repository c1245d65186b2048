"""An engine's configuration as vLLM's core would have planned it, from hand-made specs: no weights, no device.

Runs vLLM's own planners in the order of the engine's core, for every rank. Called once per modelled engine.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvmosaic.testing.geometries import DRAFT, Geometry

try:  # vLLM 0.33
    from vllm.v1.core import kv_cache_planning as planners
except ImportError:
    planners = kv_cache_utils

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
MANY_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class Settings:
    """How an engine is started. The pool has `num_blocks`, or with `spare_blocks` so many more than one request of
    `max_model_len` tokens needs. `late_save`: wait_for_save runs after the step's reports were collected."""

    budget: int = 512
    num_blocks: int = 600
    spare_blocks: int | None = None
    max_model_len: int = 4096
    asynchronous: bool = False
    num_drafts: int = 0
    late_save: bool = False
    retention: int | None = 0
    priority: bool = False
    match_unit: int | None = None
    hash_algorithm: str = "sha256"


@dataclass(frozen=True, slots=True)
class Plan:
    """`configs` and `workers` per rank. `hash_lookahead`: so many tokens after a block are in its hash (0.33)."""

    configs: tuple[VllmConfig, ...]
    workers: tuple[KVCacheConfig, ...]
    scheduler: KVCacheConfig
    scheduler_block: int
    hash_block: int
    hash_lookahead: int


def plan_engine(folder: Path, geometry: Geometry, settings: Settings, connector: dict[str, Any]) -> Plan:
    """Plan an engine; `connector` are the connector's options, `folder` is where the model's configuration goes."""
    config = _vllm_config(folder, geometry, settings, connector)
    register_all_kvcache_specs(config)
    num_blocks = settings.num_blocks
    if settings.spare_blocks is not None:
        num_blocks = _blocks_of_one_request(config, geometry, settings) + 1 + settings.spare_blocks
    config.cache_config.num_gpu_blocks_override = num_blocks
    workers = [_worker_config(config, geometry, settings) for _ in range(geometry.ranks)]
    scheduler = kv_cache_utils.generate_scheduler_kv_cache_config(workers)
    config.cache_config.num_gpu_blocks = scheduler.num_blocks
    cacheable = [g.kv_cache_spec for g in scheduler.kv_cache_groups if g.kv_cache_spec.prefix_cacheable]
    config.cache_config.block_size = min(spec.block_size for spec in cacheable)
    sizes = kv_cache_utils.resolve_kv_cache_block_sizes(scheduler, config)
    alignment = kv_cache_utils.resolve_cache_hit_alignment_tokens(scheduler, config, *sizes)
    for each in (*workers, scheduler):
        each.hash_block_size = sizes[1]
        each.cache_hit_alignment_tokens = alignment
        each.prefix_cache_retention_interval = settings.retention
    return Plan(
        configs=_rank_configs(config, geometry.ranks),
        workers=tuple(workers),
        scheduler=scheduler,
        scheduler_block=sizes[0],
        hash_block=sizes[1],
        hash_lookahead=getattr(config, "num_hash_lookahead_tokens", 0),
    )


def allocate(config: KVCacheConfig) -> dict[str, torch.Tensor]:
    """The tensors a worker registers: views of one allocation."""
    layout = KVCacheLayout[str(config.kv_cache_layout)]
    tensors: dict[str, torch.Tensor] = allocate_kv_cache(config, torch.device("cpu"), layout)
    return tensors


def _worker_config(config: VllmConfig, geometry: Geometry, settings: Settings) -> KVCacheConfig:
    specs = dict(geometry.specs(settings.num_drafts))
    groups = planners.get_kv_cache_groups(config, specs)
    for group in groups:
        group.is_eagle_group = any(name.startswith(DRAFT) for name in group.layer_names)
    worker = planners.get_kv_cache_config_from_groups(config, groups, 1 << 40)
    worker.kv_cache_layout = geometry.layout
    return worker


def _blocks_of_one_request(config: VllmConfig, geometry: Geometry, settings: Settings) -> int:
    config.cache_config.num_gpu_blocks_override = MANY_BLOCKS
    many = _worker_config(config, geometry, settings)
    return math.ceil(many.num_blocks / kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, many))


def _rank_configs(config: VllmConfig, ranks: int) -> tuple[VllmConfig, ...]:
    config.parallel_config.tensor_parallel_size = ranks
    config.parallel_config.world_size = ranks
    configs = [config]
    for rank in range(1, ranks):
        other = copy.copy(config)
        other.parallel_config = copy.copy(config.parallel_config)
        other.parallel_config.rank = rank
        configs.append(other)
    return tuple(configs)


def _vllm_config(folder: Path, geometry: Geometry, settings: Settings, connector: dict[str, Any]) -> VllmConfig:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    model = ModelConfig(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=settings.max_model_len,
        enforce_eager=True,
    )
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=16, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=min(64, settings.budget // (1 + settings.num_drafts)),
            max_num_batched_tokens=settings.budget,
            max_model_len=settings.max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            policy="priority" if settings.priority else "fcfs",
        ),
        device_config=DeviceConfig(device="cpu"),  # not found out for a version without a CPU build
        kv_transfer_config=KVTransferConfig(
            kv_connector="MosaicConnector",
            kv_connector_module_path="kvmosaic.engines.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config=connector,
        ),
    )
    _set_what_platforms_change(config, geometry, settings)
    config.speculative_config = _speculation(model, geometry, settings.num_drafts)
    return config


def _set_what_platforms_change(config: VllmConfig, geometry: Geometry, settings: Settings) -> None:
    config.scheduler_config.async_scheduling = settings.asynchronous
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    cache = config.cache_config
    cache.block_size = cache.mamba_block_size = geometry.block
    cache.kv_cache_layout = geometry.layout
    cache.mamba_cache_mode = "align"
    cache.prefix_cache_retention_interval = settings.retention
    cache.prefix_match_unit = settings.match_unit
    cache.prefix_caching_hash_algo = settings.hash_algorithm


def _speculation(model: ModelConfig, geometry: Geometry, num_drafts: int) -> SpeculativeConfig | None:
    if not num_drafts:
        return None
    speculative = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=num_drafts,
        prompt_lookup_max=3,
        prompt_lookup_min=1,
        target_model_config=model,
        target_parallel_config=ParallelConfig(),
    )
    if geometry.draft:  # a draft model's configuration would need its files
        speculative.method = "eagle"
    return speculative
