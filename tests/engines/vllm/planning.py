"""Real vLLM configurations of models that no CPU can run: hand-made specs through vLLM's own planners, CPU tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvmosaic.engines.vllm.options import Options
from kvmosaic.engines.vllm.translate import Registration, register
from kvmosaic.layout.groups import Geometry
from kvmosaic.layout.objects import compose
from kvmosaic.testing.planned import LLAMA

try:  # vLLM 0.33 plans the groups of all ranks first
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
except ImportError:
    get_global_kv_cache_groups = None
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

BF16, FP8 = torch.bfloat16, torch.uint8

OPTIONS = Options(socket=Path("/run/server.sock"))

Specs = dict[str, KVCacheSpec]


@dataclass
class Plan:
    """One engine as its core would have planned it: a configuration and tensors per rank."""

    vllm_config: VllmConfig
    workers: list[KVCacheConfig]
    scheduler: KVCacheConfig
    kv_caches: list[dict[str, torch.Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class Model:
    """`specs` per rank; `layouts` as the attention backends would prefer them."""

    specs: tuple[Specs, ...]
    layouts: tuple[str, ...] = ("LBHNC",)
    block: int = 16
    max_model_len: int = 64
    tensor_parallel: int = 1
    num_blocks: int = 64
    kernel_block: int = 0
    """How many tokens attention kernels take at a time; 0 for whole blocks."""


def full(block: int = 16, heads: int = 2, size: int = 128, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=size, dtype=BF16, **more)


def window(tokens: int, block: int = 16, heads: int = 2, size: int = 128, **more: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block, num_kv_heads=heads, head_size=size, dtype=BF16, sliding_window=tokens, **more
    )


def state(block: int, page: int, **more: Any) -> MambaSpec:
    """A gated-delta-net state: convolution and recurrent state, padded to a page."""
    return MambaSpec(
        block_size=block,
        shapes=((3, 512), (2, 32, 32)),
        dtypes=(BF16, torch.float32),
        page_size_padded=page,
        **{"mamba_cache_mode": "align", **more},
    )


def latent(block: int = 64) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=block,
        num_kv_heads=1,
        head_size=576,
        dtype=FP8,
        cache_dtype_str="fp8_ds_mla",
        state_content_bytes=656,
        max_tp_shards=1,
    )


def indexer(block: int = 64, **more: Any) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=block,
        num_kv_heads=1,
        head_size=132,
        dtype=FP8,
        cache_role=SparseCacheRole.INDEXER,
        max_tp_shards=1,
        **more,
    )


def deepseek_v4(ratios: tuple[int, ...] = (0, 4, 128, 4), bounded_replay: bool = False) -> Specs:
    shared: dict[str, Any] = {"num_kv_heads": 1, "max_tp_shards": 1, "alignment": 576}

    def compressor(head_size: int, tokens: int, block: int) -> SlidingWindowMLASpec:
        return SlidingWindowMLASpec(
            block_size=block, sliding_window=tokens, head_size=head_size, dtype=torch.float32, **shared
        )

    specs: Specs = {}
    for layer, ratio in enumerate(ratios):
        specs[f"{layer}.window"] = SlidingWindowMLASpec(
            block_size=64,
            sliding_window=128,
            head_size=512,
            dtype=FP8,
            state_content_bytes=584,
            model_version="deepseek_v4",
            bounded_replay=bounded_replay,
            **shared,
        )
        if ratio == 0:
            continue
        compressed: dict[str, Any] = {"block_size": 256, "tokens_per_state": ratio, "dtype": FP8, **shared}
        specs[f"{layer}.latent"] = MLAAttentionSpec(head_size=512, state_content_bytes=584, **compressed)
        if ratio == 4:
            specs[f"{layer}.indexer"] = MLAAttentionSpec(head_size=132, **compressed)
            specs[f"{layer}.indexer.state"] = compressor(512, 8, 4)
            specs[f"{layer}.state"] = compressor(2048, 8, 4)
        else:
            specs[f"{layer}.state"] = compressor(1024, 128, 8)
    return specs


def ring() -> CircularBufferSpec:
    return CircularBufferSpec(block_size=4, num_kv_heads=2, head_size=128, head_size_v=0, dtype=BF16, dcp_sharded=False)


def _layers(name: str, spec: KVCacheSpec, count: int) -> Specs:
    return {f"{name}{number}": spec for number in range(count)}


def _gdn(attention_heads: int = 2) -> Specs:
    return _layers("f", full(64, attention_heads), 2) | _layers("s", state(64, 64 * attention_heads * 512), 6)


def _kimi() -> Specs:
    attention = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=BF16, max_tp_shards=1)
    return _layers("m", attention, 1) | _layers("k", state(64, 64 * 1152), 3)


MODELS: dict[str, Model] = {
    "Llama": Model((_layers("f", full(), 3),)),
    "Llama, NHD": Model((_layers("f", full(), 3),), layouts=("LBNHC",)),
    "Llama, heads outside of blocks": Model((_layers("f", full(), 3),), layouts=("LHBNC",)),
    "Llama, blocks outside": Model((_layers("f", full(), 3),), layouts=("BLHNC",)),
    "Llama, heads outside of layers": Model((_layers("f", full(), 3),), layouts=("BHLNC",)),
    "Gemma 3": Model((_layers("f", full(), 2) | _layers("w", window(64), 10),)),
    "Gemma 4": Model((_layers("f", full(size=512), 2) | _layers("w", window(64, size=256), 8),)),
    "Gemma 4, blocks outside": Model(
        (_layers("f", full(size=512), 2) | _layers("w", window(64, size=256), 8),), layouts=("BLHNC",)
    ),
    "gpt-oss": Model((_layers("f", full(), 4) | _layers("w", window(128), 4),), max_model_len=256),
    "Qwen3-Next": Model((_gdn(),), block=64, max_model_len=128),
    "Qwen3-Next on two ranks": Model((_gdn(1), _gdn(1)), block=64, max_model_len=128, tensor_parallel=2),
    "DSA": Model((_layers("m", latent(), 3) | _layers("i", indexer(), 3),), block=64, max_model_len=128),
    "DSA on two ranks": Model(
        (_layers("m", latent(), 3) | _layers("i", indexer(), 3),) * 2, block=64, max_model_len=128, tensor_parallel=2
    ),
    "DeepSeek-V4": Model((deepseek_v4(),), layouts=("BLHNC",), block=256, max_model_len=256, num_blocks=220),
    "DeepSeek-V4.1": Model(
        (deepseek_v4(bounded_replay=True),), layouts=("BLHNC",), block=256, max_model_len=256, num_blocks=220
    ),
    "Kimi on two ranks": Model((_kimi(), _kimi()), block=64, max_model_len=128, tensor_parallel=2),
    "GLM with a ring": Model(
        (_layers("m", latent(128), 2) | _layers("i", indexer(128, tokens_per_state=4), 2) | _layers("r", ring(), 2),),
        layouts=("BLHNC",),
        block=128,
        max_model_len=128,
    ),
    "pipeline of two": Model((_layers("a", full(), 2), _layers("b", full(), 3))),
    "half a state per token": Model(
        (_layers("f", full(tokens_per_state=Fraction(1, 2)), 2),),
    ),
}


def plan_model(model: Model, folder: Path, **connector: Any) -> Plan:
    """Run the planners as the engine's core does."""
    config = vllm_config(folder, model, **connector)
    config.parallel_config.tensor_parallel_size = model.tensor_parallel
    config.parallel_config.pipeline_parallel_size = len(model.specs) // model.tensor_parallel
    config.parallel_config.world_size = len(model.specs)
    if any(isinstance(spec, MambaSpec) for spec in model.specs[0].values()):
        config.cache_config.mamba_cache_mode = "align"
        config.cache_config.mamba_block_size = model.block
    register_all_kvcache_specs(config)
    every = [spec for specs in model.specs for spec in specs.values()]
    config.cache_config.kv_cache_layout = None
    resolve_kv_cache_layout(config, [list(model.layouts)] * len(model.specs), every)
    copies = [dict(specs) for specs in model.specs]  # the planners change what they are given
    groups = [get_global_kv_cache_groups(config, copies)] if get_global_kv_cache_groups else []
    workers = get_kv_cache_configs(config, copies, [1 << 40] * len(copies), *groups)
    return finish(config, workers, model.kernel_block)


def finish(config: VllmConfig, workers: list[KVCacheConfig], kernel_block: int) -> Plan:
    """The rest of what the engine's core does after planning, and the tensors."""
    for worker in workers:
        # Layers of another stage, over which the allocation of 0.32 would fall.
        own = {layer for group in worker.kv_cache_groups for layer in group.layer_names}
        worker.kv_cache_tensors = [each for each in worker.kv_cache_tensors if own & set(each.layers)]
        worker.kv_cache_layout = config.cache_config.kv_cache_layout
    scheduler = kv_cache_utils.generate_scheduler_kv_cache_config(workers)
    cache_config = config.cache_config
    cache_config.num_gpu_blocks = scheduler.num_blocks
    cacheable = [g.kv_cache_spec for g in scheduler.kv_cache_groups if g.kv_cache_spec.prefix_cacheable]
    cache_config.block_size = min(spec.block_size for spec in cacheable)
    scheduler_block, hash_block = kv_cache_utils.resolve_kv_cache_block_sizes(scheduler, config)
    for each in (*workers, scheduler):
        each.hash_block_size = hash_block
        each.cache_hit_alignment_tokens = scheduler_block
    layout = KVCacheLayout[cache_config.kv_cache_layout]
    kernel_blocks = None
    if kernel_block:
        specs = [group.kv_cache_spec for group in scheduler.kv_cache_groups]
        kernel_blocks = [spec.block_size if isinstance(spec, MambaSpec) else kernel_block for spec in specs]
    kv_caches = [allocate_kv_cache(worker, torch.device("cpu"), layout, kernel_blocks) for worker in workers]
    return Plan(config, workers, scheduler, kv_caches)


def register_all(plan: Plan, options: Options = OPTIONS) -> list[Registration]:
    """What the worker half of every rank tells the server."""
    found = []
    for rank, (config, kv_caches) in enumerate(zip(plan.workers, plan.kv_caches, strict=True)):
        plan.vllm_config.parallel_config.rank = rank
        found.append(register(options, plan.vllm_config, config, kv_caches))
    return found


def compose_all(
    plan: Plan, options: Options = OPTIONS, chunk_tokens: int | None = None, separate: bool = True
) -> Geometry:
    """What the server makes of it."""
    return compose([each.declaration for each in register_all(plan, options)], chunk_tokens, separate)


def speculate(plan: Plan, flagged: set[int], **config: Any) -> None:
    """A draft model as far as the configuration goes; vLLM's own needs a checkpoint of one."""
    fields = {"method": "eagle3", "num_speculative_tokens": 2, "draft_model_config": None, **config}
    drop = fields.pop("drop", True)
    plan.vllm_config.speculative_config = SimpleNamespace(**fields, use_eagle_block_drop=lambda: drop)
    for config_of_one in (*plan.workers, plan.scheduler):
        for number, group in enumerate(config_of_one.kv_cache_groups):
            group.is_eagle_group = number in flagged


def vllm_config(folder: Path, model: Model, **connector: Any) -> VllmConfig:
    max_model_len = model.max_model_len
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    if not (
        folder / "model.safetensors"
    ).exists():  # nobody reads it, but without one the namespace is the engine's own
        (folder / "model.safetensors").write_bytes(b"weights")
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=max_model_len,
            enforce_eager=True,
        ),
        cache_config=CacheConfig(block_size=16, enable_prefix_caching=True, num_gpu_blocks_override=model.num_blocks),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=max_model_len,
            max_model_len=max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        device_config=DeviceConfig(device="cpu"),  # not found out for a version without a CPU build
        kv_transfer_config=KVTransferConfig(
            kv_connector="MosaicConnector",
            kv_connector_module_path="kvmosaic.engines.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config=connector,
        ),
    )
    config.cache_config.block_size = model.block
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    return config
