"""The models that kvmosaic must serve, with the head counts and state shapes of the real ones, as planner cases.

Layers are fewer than in the models, since a page does not know how many there are; everything that makes a page is
the model's own. `pages` are the block sizes and page bytes that vLLM 0.32 is known to plan, per kind of layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec, MLAAttentionSpec, SparseCacheRole

from tests.engines.vllm.planning import BF16, Model, Specs, deepseek_v4, full, indexer, latent, ring, window

COMPACT = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
SPLIT = ("LHBNC", "BHLNC")
OUTERMOST = ("BLHNC", "BLNHC")
LAYOUTS = (*COMPACT, *SPLIT)

Pages = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Case:
    """One way to run a model. `model.specs` holds every rank's layers, stage after stage.

    `row` is its row in the list of models, `served` the layouts in which vLLM can plan it. `pages` maps the first
    letter of a layer's name to (block tokens, page bytes), checked in the first layout. Layers in `sharers` use
    another layer's pages; those in `unregistered` are known to the planner only.
    """

    row: str
    model: Model
    served: tuple[str, ...] = COMPACT
    pages: Pages = field(default_factory=dict)
    sharers: Mapping[str, str] = field(default_factory=dict)
    unregistered: tuple[str, ...] = ()
    num_chunks: int = 1


def layers(name: str, spec: KVCacheSpec, count: int) -> Specs:
    return {f"{name}{number}": spec for number in range(count)}


def state_of(block: int, shapes: Any, page: int, **more: Any) -> MambaSpec:
    """A state as models declare it: the convolution in bf16, what recurs in fp32."""
    dtypes = (BF16, torch.float32)[: len(shapes)]
    fields = {"mamba_cache_mode": "align", **more}
    return MambaSpec(block_size=block, shapes=shapes, dtypes=dtypes, page_size_padded=page, **fields)


def unified_block(spec: MambaSpec, token_bytes: int, kernel: int = 16) -> int:
    """N: the least block of whole kernel blocks whose attention page holds a state."""
    return kernel * math.ceil(spec.state_content_size_bytes / (kernel * token_bytes))


def hybrid(shapes: Any, attention: KVCacheSpec, token_bytes: int, counts: tuple[int, int], **more: Any) -> Model:
    """States and attention on one block of N tokens; `counts` of layers of states and of attention."""
    kernel = 128 if isinstance(attention, MLAAttentionSpec) else 16
    block = unified_block(state_of(1, shapes, 1 << 40), token_bytes, kernel)
    ranks = more.pop("ranks", 1)
    state = state_of(block, shapes, block * token_bytes, **more)
    specs = layers("s", state, counts[0]) | layers("f", replace(attention, block_size=block), counts[1])
    return Model((specs,) * ranks, block=block, max_model_len=block, num_blocks=3 * sum(counts), tensor_parallel=ranks)


def gdn(ranks: int, key_heads: int, value_heads: int, kv_heads: int) -> Model:
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(ranks, key_heads, value_heads, 128, 128, 4)
    heads = kv_heads // ranks
    return hybrid(shapes, full(heads=heads, size=256), heads * 1024, (6, 2), ranks=ranks)


def mamba2(ranks: int) -> Model:
    """48 heads of 64 with states of 128: one internal checkpoint per prefill."""
    shapes = MambaStateShapeCalculator.mamba2_state_shape(
        ranks, intermediate_size=48 * 64, n_groups=ranks, num_heads=48, head_dim=64, state_size=128, conv_kernel=4
    )
    heads = 4 // ranks
    checkpoint = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}
    return hybrid(shapes, full(heads=heads), heads * 512, (9, 1), ranks=ranks, **checkpoint)


def kimi(ranks: int) -> Model:
    shapes = MambaStateShapeCalculator.kda_state_shape(ranks, 32, 128)
    return hybrid(shapes, mla(128), 1152, (3, 1), ranks=ranks)


def short_convolution() -> Model:
    shapes = MambaStateShapeCalculator.short_conv_state_shape(1, intermediate_size=2048, conv_kernel=3)
    return hybrid(shapes, full(heads=8, size=64), 2048, (4, 2))


def mla(block: int = 64) -> MLAAttentionSpec:
    """A latent of 512 + 64 values for all heads."""
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=576, dtype=BF16, max_tp_shards=1)


def sparse(latents: MLAAttentionSpec, ranks: int = 1) -> Model:
    specs = layers("m", latents, 3) | layers("i", indexer(latents.block_size), 3)
    return Model((specs,) * ranks, block=64, max_model_len=128, num_blocks=24, tensor_parallel=ranks)


def minimax_m3(heads: int) -> Model:
    """Keys of a lightning indexer on the sparse layers only."""
    keys = MLAAttentionSpec(
        block_size=128, num_kv_heads=1, head_size=128, dtype=BF16, cache_role=SparseCacheRole.INDEXER, max_tp_shards=1
    )
    specs = layers("f", full(128, heads), 3) | layers("i", keys, 2)
    return Model((specs,), block=128, max_model_len=128, num_blocks=16)


def gemma4(window_heads: int, full_heads: int, ranks: int = 1) -> Model:
    specs = layers("w", window(512, heads=window_heads // ranks, size=256), 4)
    specs |= layers("f", full(heads=full_heads // ranks, size=512), 2)
    return Model((specs,) * ranks, num_blocks=200, tensor_parallel=ranks)


def glm_with_ring() -> Model:
    specs = layers("m", latent(128), 2) | layers("i", indexer(128, tokens_per_state=4), 2) | layers("r", ring(), 2)
    return Model((specs,), block=128, max_model_len=128, num_blocks=24)


def compressed(**more: Any) -> Model:
    ranks = more.pop("ranks", 1)
    specs = deepseek_v4(**more)
    return Model((specs,) * ranks, block=256, max_model_len=256, num_blocks=220, tensor_parallel=ranks)


def stages() -> Model:
    """Two pipeline stages; the first has one window layer, so that four groups are empty there."""
    specs = deepseek_v4((0, 4, 128, 4))
    first = {name: spec for name, spec in specs.items() if name.startswith("0.")}
    rest = {name: spec for name, spec in specs.items() if not name.startswith("0.")}
    return Model((first, rest), block=256, max_model_len=256, num_blocks=220)


def llama(ranks: int = 1, heads: int = 8, **more: Any) -> Model:
    specs = layers("f", full(heads=max(1, heads // ranks), max_tp_shards=heads), 3)
    return replace(Model((specs,) * ranks, tensor_parallel=ranks, num_blocks=72), **more)


def gemma3() -> Model:
    specs = layers("w", window(1024, heads=4, size=256), 5) | layers("f", full(heads=4, size=256), 1)
    return Model((specs,), num_blocks=200)


def two_stages_of_gemma3() -> Model:
    """All layers of full attention are on the second stage."""
    windows = [layers(name, window(128, heads=4, size=256), count) for name, count in (("w", 4), ("v", 2))]
    return Model((windows[0], windows[1] | layers("f", full(heads=4, size=256), 2)), num_blocks=96)


def gpt_oss(ranks: int) -> Model:
    specs = layers("w", window(128, heads=8 // ranks, size=64), 2) | layers("f", full(heads=8 // ranks, size=64), 2)
    return Model((specs,) * ranks, num_blocks=80, tensor_parallel=ranks)


V4, V41 = "DeepSeek-V4-Flash", "DeepSeek-V4.1-Flash, GLM-5.3"
DSA, GDN = "GLM 5.1 / 5.2, DeepSeek V3.2", "Qwen3.5 / 3.6, Qwen3-Next"
CASES: dict[str, Case] = {
    "Llama": Case("Llama, Qwen2/3, Mistral", llama(), LAYOUTS, {"f": (16, 65536)}, num_chunks=2),
    "Llama, kernel blocks of 16": Case(
        "Llama, Qwen2/3, Mistral",
        replace(llama(), specs=(layers("f", full(64, 8), 3),), block=64, kernel_block=16),
        ("LBHNC", "LBNHC"),
        num_chunks=2,
    ),
    "Llama on 2 ranks": Case("Llama, Qwen2/3, Mistral", llama(2), LAYOUTS, num_chunks=2),
    "Llama on 4 ranks": Case("Llama, Qwen2/3, Mistral", llama(4), LAYOUTS),
    "two heads on 4 ranks": Case("Llama, Qwen2/3, Mistral", llama(4, 2), LAYOUTS),
    "a layer that is not registered": Case("Llama, Qwen2/3, Mistral", llama(), LAYOUTS, unregistered=("f1",)),
    "Gemma 3": Case("Gemma 2 / Gemma 3", gemma3(), LAYOUTS, {"w": (16, 65536), "f": (16, 65536)}),
    "Gemma 3 on two stages": Case("Gemma 2 / Gemma 3", two_stages_of_gemma3(), LAYOUTS),
    "Gemma 4 E4B": Case(
        "Gemma 4",
        gemma4(2, 2),
        pages={"w": (32, 65536), "f": (16, 65536)},
        sharers={"shared window": "w3", "shared full": "f1"},
    ),
    "Gemma 4 31B": Case("Gemma 4", gemma4(16, 4), pages={"w": (16, 262144), "f": (32, 262144)}),
    "Gemma 4 31B on 2 ranks": Case("Gemma 4", gemma4(16, 4, 2), pages={"w": (16, 131072), "f": (32, 131072)}),
    "gpt-oss": Case("gpt-oss", gpt_oss(1), LAYOUTS),
    "gpt-oss on 2 ranks": Case("gpt-oss", gpt_oss(2), LAYOUTS),
    "Qwen3.5-0.8B": Case(GDN, gdn(1, 16, 16, 2), pages={"s": (544, 1114112), "f": (544, 1114112)}),
    "Qwen3.5-0.8B, kernel blocks of 16": Case(GDN, replace(gdn(1, 16, 16, 2), kernel_block=16), ("LBHNC", "LBNHC")),
    "Qwen3.6-27B": Case(GDN, gdn(1, 16, 48, 4), pages={"s": (784, 3211264), "f": (784, 3211264)}),
    "Qwen3.6-27B on 2 ranks": Case(GDN, gdn(2, 16, 48, 4), pages={"s": (784, 1605632)}),
    "LFM2": Case("LFM2", short_convolution(), COMPACT, {"s": (16, 32768), "f": (16, 32768)}),
    "Mamba2": Case("Falcon-H1, Granite 4, Nemotron-H", mamba2(1), pages={"s": (784, 1605632), "f": (784, 1605632)}),
    "Mamba2 on 2 ranks": Case("Falcon-H1, Granite 4, Nemotron-H", mamba2(2)),
    "DeepSeek V3": Case("DeepSeek V2 / V3", Model((layers("m", mla(), 3),), block=64, num_blocks=24), LAYOUTS),
    "DeepSeek V3 on 4 ranks": Case(
        "DeepSeek V2 / V3",
        Model((layers("m", mla(), 3),) * 4, block=64, num_blocks=24, tensor_parallel=4),
        LAYOUTS,
        {"m": (64, 73728)},
    ),
    "DeepSeek-V4": Case(V4, compressed(), OUTERMOST, {"0": (64, 37440)}),
    "DeepSeek-V4 on 4 ranks": Case(V4, compressed(ranks=4), OUTERMOST),
    "DeepSeek-V4 on two stages": Case(V4, stages(), OUTERMOST),
    "DeepSeek-V4.1": Case(V41, compressed(bounded_replay=True), OUTERMOST),
    "GLM-5.3 with a ring": Case(
        V41, glm_with_ring(), OUTERMOST, {"m": (128, 83968), "i": (128, 4224), "r": (4, 2048)}, num_chunks=2
    ),
    "DSA, fp8": Case(DSA, sparse(latent()), pages={"m": (64, 41984), "i": (64, 8448)}, num_chunks=2),
    "DSA, fp8, on 4 ranks": Case(DSA, sparse(latent(), 4)),
    "DSA, bf16": Case(DSA, sparse(mla()), pages={"m": (64, 73728), "i": (64, 8448)}),
    "MiniMax-M3 on one of 8 ranks": Case("MiniMax-M3", minimax_m3(1), pages={"f": (128, 65536), "i": (128, 32768)}),
    "MiniMax-M3 on 2 ranks": Case(
        "MiniMax-M3", replace(minimax_m3(2), specs=minimax_m3(2).specs * 2, tensor_parallel=2)
    ),
    "MiniMax-M3": Case("MiniMax-M3", minimax_m3(4), pages={"f": (128, 262144), "i": (128, 32768)}, num_chunks=2),
    "Kimi-Linear": Case("Kimi-Linear / K3", kimi(1), pages={"s": (1920, 2211840), "f": (1920, 2211840)}),
    "Kimi-Linear on 2 ranks": Case("Kimi-Linear / K3", kimi(2), pages={"s": (1024, 1179648), "f": (1024, 1179648)}),
}
