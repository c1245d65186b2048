"""Draws the weights of a tiny checkpoint and its byte-level tokenizer, with transformers.

Owns the scales. Never reads the cache folder; kvmosaic.testing.models calls it once per checkpoint.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from kvmosaic.testing.models import NUM_BYTES, SPECIAL_TOKENS, Recipe

LOGIT_STD = 1.5
"""Standard deviation of the logits: several tokens stay likely, and none is certain."""


def draw(recipe: Recipe, folder: Path) -> None:
    """Write config, weights (bf16 safetensors) and tokenizer into an empty folder."""
    config = transformers.AutoConfig.for_model(**recipe.config)
    config.architectures = [recipe.model_class]
    config.dtype = torch.bfloat16
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2024)
        model = getattr(transformers, recipe.model_class)(config).float()
        for name, parameter in model.named_parameters():
            _fill(name, parameter.data, recipe)
    # A bar for two megabytes would stand in the way of the caller's own output.
    transformers.utils.logging.disable_progress_bar()
    model.to(torch.bfloat16).save_pretrained(folder)
    transformers.utils.logging.enable_progress_bar()
    _byte_tokenizer().save_pretrained(folder)


def _fill(name: str, tensor: torch.Tensor, recipe: Recipe) -> None:
    leaf = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    if leaf == "A_log":
        # Decay per token between about 1/5000 and 1/200: half of a state outlives hundreds of tokens.
        tensor.copy_(torch.linspace(math.log(2e-4), math.log(5e-3), tensor.numel()))
    elif leaf == "dt_bias":
        tensor.zero_()
    elif leaf == "sinks":
        tensor.normal_(0.0, 1.0)
    elif leaf == "embed_tokens":
        tensor.normal_(0.0, recipe.embedding_std)
    elif leaf == "lm_head":
        tensor.normal_(0.0, LOGIT_STD / math.sqrt(tensor.shape[-1]))
    elif tensor.dim() == 1 and not name.endswith(".bias"):
        _fill_norm(leaf, tensor, recipe)
    elif tensor.dim() == 1:
        tensor.normal_(0.0, 0.02)
    else:
        _fill_matrix(leaf, tensor, recipe)


def _fill_norm(leaf: str, tensor: torch.Tensor, recipe: Recipe) -> None:
    # Gemma and Qwen3-Next norms multiply by 1 + weight and start at 0, the others by weight and start at 1.
    if leaf in ("q_norm", "k_norm"):
        tensor.add_(recipe.attention_gain - 1.0)
    tensor.add_(torch.randn_like(tensor) * 0.05)


def _fill_matrix(leaf: str, tensor: torch.Tensor, recipe: Recipe) -> None:
    fan_in = tensor.shape[-2] if leaf in ("gate_up_proj", "down_proj") and tensor.dim() == 3 else tensor.shape[-1]
    std = 1.0 / math.sqrt(fan_in)
    if leaf in ("q_proj", "k_proj"):
        std *= recipe.attention_gain
    tensor.normal_(0.0, std)


def _byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    core = Tokenizer(BPE({letter: byte for byte, letter in enumerate(_letters())}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    bos, eos, pad = SPECIAL_TOKENS
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token=eos, pad_token=pad)


def _letters() -> list[str]:
    """How byte-level tokenizers write each byte: Latin-1 where that can be seen, else a letter from U+0100 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unseen = [byte for byte in range(NUM_BYTES) if byte not in seen]
    letters = [chr(byte) if byte in seen else chr(NUM_BYTES + unseen.index(byte)) for byte in range(NUM_BYTES)]
    assert set(letters) == set(pre_tokenizers.ByteLevel.alphabet())
    return letters
