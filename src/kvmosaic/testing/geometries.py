"""Small models of every mix of KV cache groups that is served, as specs for vLLM's own planners.

Values only: names of layers and their specs per rank. A layer whose name starts with "draft" is a draft model's.
Blocks, windows and states are shrunk so that a few hundred tokens make many chunks. Used by the modelled engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

BF16, FP8 = torch.bfloat16, torch.uint8
DRAFT = "draft"

Specs = dict[str, KVCacheSpec]


@dataclass(frozen=True, slots=True)
class Geometry:
    """`specs(num_drafts)` builds one rank's layers. `block` is the engine's block size before planning."""

    specs: Callable[[int], Specs]
    block: int = 16
    layout: str = "LBHNC"
    ranks: int = 1

    @property
    def draft(self) -> bool:
        """Whether it has layers of a draft model, so that the engine must speculate with one."""
        return any(name.startswith(DRAFT) for name in self.specs(1))

    @property
    def stateful(self) -> bool:
        """Whether it has groups that keep one state at a position."""
        return any(isinstance(spec, MambaSpec) for spec in self.specs(0).values())

    @property
    def sparse(self) -> bool:
        """Whether the engine's own cache may keep only some blocks of a group."""
        kinds = (MambaSpec, SlidingWindowSpec, SlidingWindowMLASpec)
        return any(isinstance(spec, kinds) for spec in self.specs(0).values())


def full(block: int = 16, heads: int = 1, size: int = 64) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=size, dtype=BF16)


def window(tokens: int, block: int = 16, heads: int = 1) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block, num_kv_heads=heads, head_size=64, dtype=BF16, sliding_window=tokens)


def state(block: int, num_drafts: int = 0, width: int = 8) -> MambaSpec:
    """A convolution and a recurrent state, padded to a page of full attention."""
    return MambaSpec(
        block_size=block,
        shapes=((3, width), (2, 4, 4)),
        dtypes=(BF16, torch.float32),
        page_size_padded=full(block).page_size_bytes,
        mamba_cache_mode="align",
        num_speculative_blocks=num_drafts,
    )


def latent(block: int, **more: Any) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=72, dtype=FP8, max_tp_shards=1, **more)


def indexer(block: int, **more: Any) -> MLAAttentionSpec:
    role = SparseCacheRole.INDEXER
    return MLAAttentionSpec(
        block_size=block, num_kv_heads=1, head_size=24, dtype=FP8, cache_role=role, max_tp_shards=1, **more
    )


def layers(name: str, spec: KVCacheSpec, count: int) -> Specs:
    return {f"{name}{number}": spec for number in range(count)}


def compressed(bounded_replay: bool = False) -> Specs:
    """DeepSeek-V4 in small: blocks of 32, 16, 8 and 4 tokens, pages of five sizes in one block id."""
    shared: dict[str, Any] = {"num_kv_heads": 1, "max_tp_shards": 1, "alignment": 64}

    def memory(size: int, tokens: int, block: int) -> SlidingWindowMLASpec:
        return SlidingWindowMLASpec(
            block_size=block, sliding_window=tokens, head_size=size, dtype=torch.float32, **shared
        )

    def scattered(size: int, ratio: int) -> MLAAttentionSpec:
        return MLAAttentionSpec(block_size=32, tokens_per_state=ratio, head_size=size, dtype=FP8, **shared)

    recent = SlidingWindowMLASpec(
        block_size=16,
        sliding_window=32,
        head_size=56,
        dtype=FP8,
        model_version="deepseek_v4",
        bounded_replay=bounded_replay,
        **shared,
    )
    specs: Specs = {}
    for layer, ratio in enumerate((0, 4, 16)):
        specs[f"{layer}.window"] = recent
        if ratio == 4:
            specs[f"{layer}.latent"] = scattered(56, 4)
            specs[f"{layer}.indexer"] = scattered(24, 4)
            specs[f"{layer}.indexer.memory"] = memory(16, 8, 4)
            specs[f"{layer}.memory"] = memory(32, 8, 4)
        elif ratio:
            specs[f"{layer}.latent"] = scattered(56, ratio)
            specs[f"{layer}.memory"] = memory(32, 16, 8)
    return specs


def ring() -> CircularBufferSpec:
    return CircularBufferSpec(block_size=4, num_kv_heads=1, head_size=32, head_size_v=0, dtype=BF16, dcp_sharded=False)


GEOMETRIES: dict[str, Geometry] = {
    "full": Geometry(lambda _: layers("f", full(), 3)),
    "full, two ranks": Geometry(lambda _: layers("f", full(), 2), ranks=2),
    "full, blocks outside": Geometry(lambda _: layers("f", full(32), 2), layout="BLHNC"),
    "window": Geometry(lambda _: layers("f", full(), 1) | layers("w", window(40), 2)),
    "narrow window": Geometry(lambda _: layers("f", full(8), 1) | layers("w", window(7, 8), 2), block=8),
    "wide window": Geometry(lambda _: layers("f", full(), 1) | layers("w", window(150), 2)),
    "window alone": Geometry(lambda _: layers("w", window(40), 2)),
    "two windows": Geometry(lambda _: layers("f", full(), 1) | layers("n", window(20), 1) | layers("w", window(90), 1)),
    "state": Geometry(lambda drafts: layers("f", full(32), 1) | layers("s", state(32, drafts), 3), block=32),
    "state, two ranks": Geometry(
        lambda drafts: layers("f", full(32), 1) | layers("s", state(32, drafts), 1), block=32, ranks=2
    ),
    "two states": Geometry(
        lambda drafts: (
            layers("f", full(32), 1) | layers("s", state(32, drafts), 1) | layers("t", state(32, drafts, 16), 1)
        ),
        block=32,
    ),
    "state and window": Geometry(
        lambda drafts: layers("f", full(32), 1) | layers("s", state(32, drafts), 1) | layers("w", window(50, 32), 1),
        block=32,
    ),
    "latent and indexer": Geometry(lambda _: layers("m", latent(16), 2) | layers("i", indexer(16), 2)),
    "latent and indexer, two ranks": Geometry(
        lambda _: layers("m", latent(16), 2) | layers("i", indexer(16), 2), ranks=2
    ),
    "compressed": Geometry(lambda _: compressed(), block=32, layout="BLHNC"),
    "compressed, replayed": Geometry(lambda _: compressed(bounded_replay=True), block=32, layout="BLHNC"),
    "ring": Geometry(
        lambda _: layers("m", latent(32), 2) | layers("i", indexer(32, tokens_per_state=4), 2) | layers("r", ring(), 1),
        block=32,
        layout="BLHNC",
    ),
    "draft": Geometry(lambda _: layers("f", full(), 2) | layers(DRAFT, full(), 1)),
    "draft and window": Geometry(
        lambda _: layers("f", full(), 1) | layers("w", window(40), 1) | layers(DRAFT, window(60), 1)
    ),
    "draft and state": Geometry(
        lambda drafts: layers("f", full(32), 1) | layers("s", state(32, drafts), 1) | layers(DRAFT, full(32), 1),
        block=32,
    ),
}
