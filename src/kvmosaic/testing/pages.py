"""The pages of one modelled rank: which bytes of its memory stand for which mark.

    block of a group   [ slot | slot | ... | slot ] padding        one slot: the bytes of one token (or of several,
                                                                    for compressed caches), or a whole state

Owns the views of one allocation, laid out by vLLM's configuration; knows no request. Used by the modelled runner.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    KVCacheConfig,
    MambaSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    compute_layer_kv_cache_shape_bytes,
)

from kvmosaic.testing.geometries import DRAFT
from kvmosaic.testing.sequences import Marks, mark_of

POISON = 0xA5
Bytes = npt.NDArray[np.uint8]


class Use(Enum):
    """How the engine reads a group."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"
    RING = "ring"


@dataclass(frozen=True, slots=True)
class Layer:
    """`view` has shape [blocks, slots, bytes]. `lookahead` is 1 where a slot also depends on the next token."""

    name: str
    view: Bytes
    slot_tokens: int
    salt: int
    lookahead: int

    @property
    def slots(self) -> int:
        """In one block."""
        return self.view.shape[1]

    def content(self, marks: Marks) -> Bytes:
        """The bytes that stand for these marks, shape [marks, bytes]."""
        num_bytes = self.view.shape[2]
        words = np.arange(1, 2 * -(-num_bytes // 8), 2, dtype=np.uint64)
        return ((marks ^ np.uint64(self.salt))[:, None] * words).view(np.uint8)[:, :num_bytes]


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group. `memory` is how many tokens before the next one a window reads; `replay` marks a window
    that is computed again after a hit."""

    number: int
    use: Use
    block_tokens: int
    memory: int
    replay: bool
    layers: tuple[Layer, ...]


class Pages:
    """One rank's memory. `salt` makes its bytes differ from those of other ranks and engines."""

    def __init__(self, config: KVCacheConfig, raw: Bytes, rank_salt: str, engine_salt: str) -> None:
        self.raw = raw
        self._config = config
        self._rank_salt = rank_salt
        self.reweigh(engine_salt)
        raw[:] = POISON

    def reweigh(self, engine_salt: str) -> None:
        """From now on other bytes stand for the same marks."""
        self._engine_salt = engine_salt
        self.groups = tuple(self._group(number) for number in range(len(self._config.kv_cache_groups)))

    def fill(self, blocks: list[int], value: int) -> None:
        """Overwrite these blocks in every group: they share their bytes."""
        for layer in self._layers():
            layer.view[blocks] = value

    def copy(self, source: int, target: int) -> None:
        for layer in self._layers():
            layer.view[target] = layer.view[source]

    def is_poison(self, block: int) -> bool:
        return all((layer.view[block] == POISON).all() for layer in self._layers())

    def _layers(self) -> Iterator[Layer]:
        return (layer for group in self.groups for layer in group.layers)

    def _group(self, number: int) -> Group:
        group = self._config.kv_cache_groups[number]
        own = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        specs = {name: own.get(name, group.kv_cache_spec) for name in group.layer_names}
        layers = [
            self._layer(tensor, index, specs[name])
            for tensor in self._config.kv_cache_tensors
            for index, name in enumerate(tensor.layers)
            if name in specs
        ]
        spec = next(iter(specs.values()))
        use = use_of(spec)
        return Group(
            number=number,
            use=use,
            block_tokens=spec.block_size,
            memory=spec.sliding_window - 1 if use is Use.WINDOW else 0,
            replay=bool(getattr(spec, "bounded_replay", False)),
            layers=tuple(layers),
        )

    def _layer(self, tensor: Any, index: int, spec: Any) -> Layer:  # Any: vLLM's classes are not typed here
        name = tensor.layers[index]
        slots = 1 if use_of(spec) in (Use.STATE, Use.RING) else int(spec.num_states)
        payload = math.prod(compute_layer_kv_cache_shape_bytes(spec, 1)[1:])
        assert payload % slots == 0, f"{name}: {payload} bytes in {slots} slots"
        view = np.lib.stride_tricks.as_strided(
            self.raw[tensor.offset + index * tensor.layer_stride :],
            (self._config.num_blocks, slots, payload // slots),
            (tensor.block_stride, payload // slots, 1),
        )
        replicated = getattr(spec, "max_tp_shards", None) == 1
        salt = mark_of(f"{self._engine_salt}/{'' if replicated else self._rank_salt}/{name}")
        return Layer(name, view, spec.block_size // slots, salt, int(name.startswith(DRAFT)))


def use_of(spec: Any) -> Use:  # Any: vLLM's classes are not typed here
    if isinstance(spec, MambaSpec):
        return Use.STATE
    if isinstance(spec, CircularBufferSpec):
        return Use.RING
    if isinstance(spec, SlidingWindowSpec | SlidingWindowMLASpec):
        return Use.WINDOW
    return Use.FULL
