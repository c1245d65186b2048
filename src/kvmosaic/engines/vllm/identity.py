"""The fingerprint of all that makes cached bytes comparable: two engines share a cache only if it is equal.

Names values, compares nothing; the server hashes them into the namespace. Called once at start by a worker through
engines.vllm.translate. Reads the model's directory; a wrong answer here is a wrong byte later, so in doubt a field
is included: the price of one too many is a miss.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import platform
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from vllm.config import ModelConfig, VllmConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.version import __version_tuple__

from kvmosaic.engines.copying import PageMap
from kvmosaic.engines.vllm.options import Options

logger = logging.getLogger(__name__)

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors")
# What changes the embeddings of an image whose hash stays the same.
_IMAGE_FIELDS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "mm_device_do_normalize",
    "video_pruning_rate",
    "video_pruning_method",
)
# A safetensors header starts with its length; tensors' names, shapes and offsets follow.
_HEADER_BYTES = 1 << 20


def describe_engine(options: Options, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, str]:
    """What must be equal on all ranks, by name."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    multimodal = getattr(model, "multimodal_config", None)
    identity = {
        "vllm": ".".join(str(part) for part in __version_tuple__[:2]),
        "machine": platform.machine(),
        "model": options.model_tag or _model_location(model),
        "weights": options.model_tag or weights_fingerprint(model, vllm_config),
        "weights epoch": options.weights_epoch,
        "config": config_digest(model),
        "model classes": _plain(getattr(model, "model_class_overrides", None)),
        "dtype": str(model.dtype),
        "quantization": f"{model.quantization}, {_plain(getattr(model, 'quantization_config', None))}",
        "cache dtype": str(cache.cache_dtype),
        "layout": str(kv_cache_config.kv_cache_layout),
        "tensor parallel": str(parallel.tensor_parallel_size),
        "pipeline parallel": str(parallel.pipeline_parallel_size),
        "speculation": _speculation(vllm_config),
        "hash": _hash_seed(vllm_config),
        "hash block": str(kv_cache_config.hash_block_size),
        "hash lookahead": str(getattr(vllm_config, "num_hash_lookahead_tokens", 0)),
        "images": _fields(multimodal, _IMAGE_FIELDS),
        "lora": _fields(vllm_config.lora_config, ("lora_dtype", "fully_sharded_loras")),
    }
    if "longrope" in json.dumps(model.hf_config.to_dict(), default=str):
        # vLLM chooses this rotary embedding's factors by the length the engine is started with.
        identity["max model len"] = str(model.max_model_len)
    return identity


def describe_pages(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, pages: Sequence[PageMap]) -> str:
    """This rank's page formats: a digest of every group's layers, specs, backends and order of bytes."""
    layers = vllm_config.compilation_config.static_forward_context
    text = [
        (
            list(group.layer_names),
            _plain(group.kv_cache_spec),
            sorted({_backend(layers[name]) for name in group.layer_names if name in layers}),
            page_map.lengths.tolist(),
        )
        for group, page_map in zip(kv_cache_config.kv_cache_groups, pages, strict=True)
    ]
    return _digest(text)


def config_digest(model: ModelConfig) -> str:
    """The resolved configuration of the model, user's overrides included, wherever it was read from."""
    config = model.hf_config.to_dict()
    config.pop("_name_or_path", None)
    return _digest(config)


def weights_fingerprint(model: ModelConfig, vllm_config: VllmConfig) -> str:
    """Changes when a weight file is added, removed or replaced.

    Not a digest of the weights: reading them would take as long as loading the model once more. Weights that are
    not files here (an object store) could be replaced unseen, so such an engine shares with nobody.
    """
    if vllm_config.load_config.load_format == "dummy":
        return f"dummy weights, seed {model.seed}"
    directory = _model_directory(model, vllm_config.load_config.download_dir)
    files = [] if directory is None else [path for path in directory.rglob("*") if path.suffix in _WEIGHT_SUFFIXES]
    if directory is None or not files:
        logger.warning(
            "kvmosaic finds no weight files of %s, so nothing outlives this engine; set kvmosaic.model_tag to a name "
            "that you change with the weights",
            model.model,
        )
        return f"unknown in {vllm_config.kv_transfer_config.engine_id}"
    files.sort()
    return _digest([(str(path.relative_to(directory)), *_file_facts(path)) for path in files])


def _model_location(model: ModelConfig) -> str:
    """Where the user said that the weights are; for an object store, `model` is a temporary copy of the rest."""
    name = getattr(model, "model_weights", "") or str(model.model)
    return str(Path(name).resolve()) if Path(name).exists() else name


def _model_directory(model: ModelConfig, download_dir: str | None) -> Path | None:
    """Where the weights lie on this machine, None when that is not known."""
    path = Path(model.model)
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    try:
        cached = try_to_load_from_cache(
            str(model.model), "config.json", cache_dir=download_dir, revision=model.revision
        )
    except ValueError:  # not the name of a repository
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _file_facts(path: Path) -> tuple[int, int, str]:
    status = path.stat()
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    return status.st_size, status.st_mtime_ns, hashlib.sha256(header).hexdigest()


def _speculation(vllm_config: VllmConfig) -> str:
    speculative = vllm_config.speculative_config
    if speculative is None:
        return "none"
    facts: list[object] = [
        str(speculative.method),
        speculative.num_speculative_tokens,
        speculative.use_eagle_block_drop(),
    ]
    draft = speculative.draft_model_config
    if draft is not None:
        facts += [str(draft.model), config_digest(draft), str(draft.dtype), str(draft.quantization)]
        facts.append(weights_fingerprint(draft, vllm_config))
    return _digest(facts)


def _hash_seed(vllm_config: VllmConfig) -> str:
    """The algorithm of the block hashes and the seed of the first one.

    A seed that is random per process must make the namespace this engine's own: digests of different seeds are
    not comparable, and all ranks have to say the same.
    """
    name = vllm_config.cache_config.prefix_caching_hash_algo
    if hash_seed_is_random(name):
        return f"{name}, random in {vllm_config.kv_transfer_config.engine_id}"
    return f"{name}, {resolve_none_hash_seed(get_hash_fn_by_name(name))}"


def hash_seed_is_random(name: str) -> bool:
    """Whether every process draws its own seed for this algorithm of block hashes."""
    function = get_hash_fn_by_name(name)
    return resolve_none_hash_seed(function) != resolve_none_hash_seed(function)


def _backend(layer: object) -> str:
    """The attention backend decides how K and V are packed within a page; on a CPU, so does its instruction set."""
    get_backend = getattr(layer, "get_attn_backend", None)
    name = get_backend().get_name() if get_backend is not None else type(layer).__name__
    return f"{name}/{getattr(layer, 'isa', '-')}"


def _fields(config: Any, names: Sequence[str]) -> str:  # Any: one of vLLM's configs, or None
    """The named fields, as far as this version of vLLM has them."""
    return _plain({name: getattr(config, name, None) for name in names}) if config is not None else "none"


def _plain(value: Any) -> str:  # Any: whatever a vLLM spec holds
    """A text that is equal exactly for equal specs: every field, except where pages lie."""
    if isinstance(value, KVCacheSpec):
        fields = {
            field.name: _plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.name != "block_stride_alignment"
        }
        return f"{type(value).__name__}{sorted(fields.items())}"
    if isinstance(value, dict):
        return str(sorted((str(key), _plain(item)) for key, item in value.items()))
    if isinstance(value, tuple | list):
        return str([_plain(item) for item in value])
    if isinstance(value, Enum):
        return value.name
    return str(value)


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
