"""Tiny random checkpoints at real scale, for runs of a real engine without a download.

Owns the recipes, the folder they are cached in, and prompts. kvmosaic.testing.weights draws the weights, with torch; it
is imported only when a checkpoint is missing. Called by the engine tests and by `kvmosaic demo`.

Dummy weights give the same token for every prompt, so a wrong cache goes unseen. These give sharp attention and states
that decay slowly: what stands a thousand tokens back changes the next log-probabilities by more than rounding does. All
experts of a mixture take part, since one that is chosen by a hair would turn rounding into a jump.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NUM_BYTES = 256
"""Token ids below this one are the bytes themselves; the special tokens follow."""
SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
VOCAB_SIZE = 320
FORMAT = 1
"""Raised when the way weights are drawn changes, so that cached checkpoints are drawn anew."""

_COMMON: Mapping[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": NUM_BYTES,
    "eos_token_id": NUM_BYTES + 1,
    "pad_token_id": NUM_BYTES + 2,
}
_ROPE = {"rope_type": "default", "rope_theta": 1_000_000.0}

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 2.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one checkpoint is made. `attention_gain` scales queries and keys: it decides how sharp attention is."""

    name: str
    model_class: str
    config: Mapping[str, object]
    attention_gain: float = 1.0
    embedding_std: float = 1.0
    window_tokens: int | None = None


def _qwen3_next(name: str, value_heads: int) -> Recipe:
    config = {
        **_COMMON,
        "model_type": "qwen3_next",
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25},
        "partial_rotary_factor": 0.25,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": value_heads,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128,
        "num_experts": 4,
        "num_experts_per_tok": 4,
    }
    return Recipe(name, "Qwen3NextForCausalLM", config, attention_gain=2.2)


RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "llama",
            "LlamaForCausalLM",
            {**_COMMON, "model_type": "llama", "rope_parameters": _ROPE},
            attention_gain=2.2,
        ),
        Recipe(
            "gemma3",
            "Gemma3ForCausalLM",
            {
                **_COMMON,
                "model_type": "gemma3_text",
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": 64,
                "sliding_window": 640,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
                "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
            },
            attention_gain=1.5,
            # Gemma multiplies embeddings by the square root of the hidden size.
            embedding_std=128**-0.5,
            window_tokens=640,
        ),
        Recipe(
            "gpt-oss",
            "GptOssForCausalLM",
            {
                **_COMMON,
                "model_type": "gpt_oss",
                "intermediate_size": 64,
                "num_local_experts": 4,
                "num_experts_per_tok": 4,
                "sliding_window": 128,
                "attention_bias": True,
                "rope_parameters": _YARN,
            },
            attention_gain=2.2,
            window_tokens=128,
        ),
        _qwen3_next("qwen3-next", value_heads=4),
        _qwen3_next("qwen3-next-wide", value_heads=8),
    )
}
"""The wide one has twice the state, so the engine plans another block size for it."""


def default_folder() -> Path:
    """Where checkpoints are kept unless the caller names a folder."""
    return Path.home() / ".cache" / "kvmosaic" / "models"


def checkpoint(name: str, folder: Path | None = None) -> Path:
    """The folder of the named checkpoint, made first when it is not there. Safe when several processes ask at once."""
    recipe = RECIPES[name]
    parent = folder or default_folder()
    target = parent / f"{name}-{_digest(recipe)}"
    if (target / "config.json").exists():
        return target
    parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=parent))
    try:
        weights = importlib.import_module("kvmosaic.testing.weights")
        weights.draw(recipe, scratch)
        scratch.chmod(0o755)
        os.rename(scratch, target)
    except OSError:
        # Another process was first: its checkpoint is the same, byte for byte.
        if not (target / "config.json").exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def prompt(num_tokens: int, seed: int) -> list[int]:
    """Token ids of a random prompt; two seeds differ from the first tokens on, one seed gives prefixes of one text."""
    # Whole words, since the generator fills the bytes of its last word from the other end.
    return list(random.Random(f"prompt {seed}").randbytes(num_tokens + 3 & ~3)[:num_tokens])


def _digest(recipe: Recipe) -> str:
    content = json.dumps(
        [FORMAT, recipe.name, recipe.attention_gain, recipe.embedding_std, dict(recipe.config)], sort_keys=True
    )
    return hashlib.sha256(content.encode()).hexdigest()[:8]
