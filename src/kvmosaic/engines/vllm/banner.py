"""The one log line at engine start that says what can ever hit."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvmosaic.core.types import Kind
from kvmosaic.engines.vllm.identity import hash_seed_is_random
from kvmosaic.layout.groups import Geometry, ObjectGroup


def describe(geometry: Geometry, vllm_config: Any) -> str:  # Any: vLLM's config classes are not typed here
    """For the person who wonders why a prompt did not hit: geometry, boundaries and what the engine does."""
    chunk = geometry.chunk_tokens
    state = has_state(geometry)
    boundaries = f"multiples of {chunk} tokens" + (" where the engine ended a step" if state else "")
    facts = [
        f"model {geometry.model}",
        *([f"N={min(g.block_tokens for g in geometry.groups if g.kind is Kind.STATE)}"] if state else []),
        f"C={chunk}",
        f"groups {_count_groups(geometry)}",
        "object groups " + ", ".join(_name(objects) for objects in geometry.object_groups),
        f"hits end at {boundaries}; a prompt of {chunk} tokens or less never hits",
        f"token budget {vllm_config.scheduler_config.max_num_batched_tokens}",
        f"retention {getattr(vllm_config.cache_config, 'prefix_cache_retention_interval', None)}",
        f"speculation {_speculation(vllm_config)}",
        f"hashes {_hashes(vllm_config)}",
    ]
    warnings = [f"warning: {warning}" for warning in geometry.warnings]
    return "kvmosaic serves " + "; ".join(facts + warnings)


def has_state(geometry: Geometry) -> bool:
    """Whether the model has groups that remember one state at a position."""
    return any(group.kind is Kind.STATE and group.cacheable for group in geometry.groups)


def _count_groups(geometry: Geometry) -> str:
    counts = Counter(group.kind.value if group.cacheable else "not cached" for group in geometry.groups)
    return " + ".join(f"{count} {kind}" for kind, count in counts.items())


def _name(objects: ObjectGroup) -> str:
    reach = "all chunks" if objects.reach_chunks is None else f"last {objects.reach_chunks}"
    return f"{objects.kind.value} ({reach}, {objects.object_bytes} bytes a chunk)"


def _speculation(vllm_config: Any) -> str:
    speculative = vllm_config.speculative_config
    if speculative is None:
        return "off"
    return f"{speculative.method} ({speculative.num_speculative_tokens} tokens): decoded turns keep no state"


def _hashes(vllm_config: Any) -> str:
    name = vllm_config.cache_config.prefix_caching_hash_algo
    facts = [name]
    if hash_seed_is_random(name):
        facts.append("with a random seed, so that no other engine and no restart of this one ever hits")
    if "xxhash" in name:
        facts.append("not cryptographic: whoever chooses prompts may make two of them collide")
    return ", ".join(facts)
