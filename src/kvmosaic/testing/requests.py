"""What a user may ask of a modelled engine: prompts with salts, adapters, images and priorities. Values only."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvmosaic.testing.sequences import Sequence

IMAGE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `images` are pairs of a position and what is seen there; `adapter` 0 is none."""

    name: str
    tokens: tuple[int, ...]
    max_tokens: int = 1
    salt: str = ""
    adapter: int = 0
    images: tuple[tuple[int, str], ...] = ()
    priority: int = 0

    def sequence(self) -> Sequence:
        return Sequence(self.tokens, f"{self.salt}/{self.adapter}", dict(self.images))


class TextRequest(Request):
    """A request whose images were encoded elsewhere: they are in its hashes, and nothing is left to encode."""

    @property
    def num_encoder_inputs(self) -> int:
        return 0


def make_request(ask: Ask, hasher: Callable[[Request], list[Any]]) -> Request:
    adapter = LoRARequest(f"adapter-{ask.adapter}", ask.adapter, f"/adapters/{ask.adapter}") if ask.adapter else None
    return TextRequest(
        request_id=ask.name,
        prompt_token_ids=list(ask.tokens),
        sampling_params=SamplingParams(max_tokens=ask.max_tokens, temperature=0.0, ignore_eos=True),
        pooling_params=None,
        arrival_time=time.time(),
        mm_features=[
            MultiModalFeatureSpec(None, "image", seen, PlaceholderRange(offset=position, length=IMAGE_TOKENS))
            for position, seen in ask.images
        ],
        lora_request=adapter,
        cache_salt=ask.salt or None,
        priority=ask.priority,
        block_hasher=hasher,
    )
