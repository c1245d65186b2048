"""Where vLLM keeps a page, written down anew from its planner's output: no line of kvmosaic is called.

A page is `heads` equal pieces of its payload; where they lie follows from the layout's name alone. Padding is none
of them. vLLM's own views say the same, which the tests that use this check.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, KVCacheTensor, compute_layer_kv_cache_shape_bytes

Bytes = npt.NDArray[np.uint8]


def spec_of(config: KVCacheConfig, group: int, layer: str) -> KVCacheSpec:
    spec: Any = config.kv_cache_groups[group].kv_cache_spec
    return getattr(spec, "kv_cache_specs", {}).get(layer, spec)


def page_pieces(config: KVCacheConfig, layer: str, group: int, block: int) -> list[slice]:
    """The bytes of one layer's page for one block, in the order of the payload."""
    tensor, index = _place(config, layer)
    spec = spec_of(config, group, layer)
    heads = spec.num_heads
    payload = math.prod(compute_layer_kv_cache_shape_bytes(spec, 1)[1:])
    start = tensor.offset + index * tensor.layer_stride + block * tensor.block_stride
    match config.kv_cache_layout:
        case "LHBNC" if heads > 1:
            steps = [head * config.num_blocks * tensor.block_stride for head in range(heads)]
        case "BHLNC" if heads > 1:
            steps = [head * len(tensor.layers) * tensor.layer_stride for head in range(heads)]
        case _:
            return [slice(start, start + payload)]
    return [slice(start + step, start + step + payload // heads) for step in steps]


def layers_of(config: KVCacheConfig, group: int) -> list[str]:
    """The layers of a group that have pages of their own."""
    placed = {layer for tensor in config.kv_cache_tensors for layer in tensor.layers}
    return [layer for layer in config.kv_cache_groups[group].layer_names if layer in placed]


def storage_of(kv_caches: dict[str, torch.Tensor]) -> Bytes:
    """All bytes of a rank's cache, writable."""
    storage = next(iter(kv_caches.values())).untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def view_pieces(cache: torch.Tensor, block: int, num_blocks: int) -> list[slice]:
    """The bytes that a layer can reach through vLLM's own view of a block, in ascending order, neighbours joined."""
    ratio = cache.shape[0] // num_blocks
    part = cache[block * ratio : (block + 1) * ratio]
    starts, length = [part.storage_offset()], 1
    for stride, count in sorted(zip(part.stride(), part.shape, strict=True)):
        if stride == length and len(starts) == 1:
            length *= count
        else:
            starts = [start + step * stride for start in starts for step in range(count)]
    width = part.element_size()
    return joined([slice(start * width, (start + length) * width) for start in starts])


def joined(pieces: list[slice]) -> list[slice]:
    """The same bytes in ascending order, with pieces that touch made one."""
    found: list[slice] = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if found and found[-1].stop == piece.start:
            piece = slice(found.pop().start, piece.stop)
        found.append(piece)
    return found


def _place(config: KVCacheConfig, layer: str) -> tuple[KVCacheTensor, int]:
    return next((tensor, tensor.layers.index(layer)) for tensor in config.kv_cache_tensors if layer in tensor.layers)
