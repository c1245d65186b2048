"""Groups to object groups: composes what all ranks of an engine declared into one Geometry.

Owns the chunk rule, the reach of each kind, the byte map of an object and the namespace. Pure functions; whatever
cannot be served is `Refused` with the values, the limit and the fix. Called by the server when the last rank has
declared.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import msgspec

from kvmosaic.core.types import Kind, Namespace
from kvmosaic.errors import Refused
from kvmosaic.layout.groups import Declaration, Geometry, Group, ObjectGroup

FORMAT_VERSION = 1
"""Raised when the meaning of an object's bytes changes, so that no older object is ever read."""

MIN_CHUNK_TOKENS = 256
MAX_OBJECT_GROUPS = 32  # a presence mask travels as u32

_KIND_ORDER = (Kind.FULL, Kind.WINDOW, Kind.STATE)
_SAME_ON_ALL_RANKS = ("world", "model", "groups", "hash_block_tokens", "max_num_batched_tokens")


def compose(declarations: Sequence[Declaration], chunk_tokens: int | None, separate: bool) -> Geometry:
    """Compose the geometry of an engine from the declarations of all its ranks, or raise Refused.

    `chunk_tokens` is the value of --chunk-size, None for automatic; `separate` that of
    --separate-object-groups.
    """
    ranks = sorted(declarations, key=lambda declaration: declaration.rank)
    _check_agreement(ranks)
    _check_groups(ranks)
    first = ranks[0]
    chunk, warnings = _choose_chunk(first.groups, chunk_tokens)
    if chunk % first.hash_block_tokens:
        raise Refused(f"chunk size {chunk} is not a multiple of the engine's hash block size {first.hash_block_tokens}")
    if not separate:
        _check_merged_budget(first)
    object_groups = _object_groups(ranks, chunk, separate)
    return Geometry(
        model=first.model,
        namespace=_namespace(ranks, chunk, separate),
        chunk_tokens=chunk,
        groups=first.groups,
        object_groups=object_groups,
        world=first.world,
        hash_block_tokens=first.hash_block_tokens,
        warnings=warnings,
    )


def _check_agreement(ranks: Sequence[Declaration]) -> None:
    if not ranks:
        raise Refused("no rank has declared its pages")
    first = ranks[0]
    numbers = [declaration.rank for declaration in ranks]
    duplicates = [rank for rank in numbers if numbers.count(rank) > 1]
    if duplicates:
        raise Refused(f"rank {duplicates[0]} was declared twice; give each engine its own instance id")
    for other in ranks[1:]:
        for field in _SAME_ON_ALL_RANKS:
            _check_same(first, other, field, getattr(first, field), getattr(other, field))
        for name in sorted(first.identity.keys() | other.identity.keys()):
            _check_same(first, other, f"identity {name}", first.identity.get(name), other.identity.get(name))
    if numbers != list(range(first.world)):
        raise Refused(f"the engine has {first.world} ranks but ranks {numbers} have declared")


def _check_same(first: Declaration, other: Declaration, field: str, value: object, found: object) -> None:
    if value != found:
        raise Refused(
            f"ranks disagree on {field}: rank {first.rank} declared {value!r}, rank {other.rank} declared {found!r}"
        )


def _check_groups(ranks: Sequence[Declaration]) -> None:
    groups = ranks[0].groups
    if not any(group.cacheable for group in groups):
        raise Refused("no group of this model is prefix-cacheable, so there is nothing to store")
    for g, group in enumerate(groups):
        if group.block_tokens < 1 or group.memory_tokens < 0:
            raise Refused(f"group {g} has block size {group.block_tokens} and remembers {group.memory_tokens} tokens")
    if ranks[0].hash_block_tokens < 1:
        raise Refused(f"the hash block size is {ranks[0].hash_block_tokens}; it must be at least 1")
    for declaration in ranks:
        if len(declaration.shards) != len(groups):
            raise Refused(f"rank {declaration.rank} declared {len(declaration.shards)} shards for {len(groups)} groups")
        for g in range(len(groups)):
            _check_shard(ranks, declaration, g)


def _check_shard(ranks: Sequence[Declaration], declaration: Declaration, g: int) -> None:
    shard = declaration.shards[g]
    where = f"rank {declaration.rank}, group {g}"
    if shard.block_bytes < 0:
        raise Refused(f"{where}: a block of {shard.block_bytes} bytes")
    if not 0 <= shard.stored_by < len(ranks):
        raise Refused(f"{where}: stored by rank {shard.stored_by}, but there are {len(ranks)} ranks")
    storing = ranks[shard.stored_by].shards[g]
    if storing.stored_by != shard.stored_by:
        raise Refused(f"{where}: stored by rank {shard.stored_by}, which itself is stored by rank {storing.stored_by}")
    if storing.block_bytes != shard.block_bytes:
        raise Refused(
            f"{where}: a replica of {shard.block_bytes} bytes a block, but rank {shard.stored_by}, "
            f"which stores it, has {storing.block_bytes}"
        )


def _choose_chunk(groups: Sequence[Group], asked: int | None) -> tuple[int, tuple[str, ...]]:
    """Return the chunk size and warnings about it.

    A state model takes the lcm itself: the engine ends steps on multiples of its block, so only there can states
    be stored, and a larger chunk loses hits.
    """
    unit = _unit_tokens(groups)
    has_state = any(group.kind is Kind.STATE for group in groups if group.cacheable)
    if asked is None:
        return (unit if has_state else unit * -(-MIN_CHUNK_TOKENS // unit)), ()
    if asked < 1 or asked % unit:
        below, above = asked // unit * unit, (asked // unit + 1) * unit
        nearest = f"{below} or {above}" if below > 0 else f"{above}"
        raise Refused(
            f"--chunk-size {asked} is not a multiple of the engine's block size {unit}; "
            f"use {nearest}, or leave out --chunk-size"
        )
    if has_state and asked > unit:
        return asked, (
            f"--chunk-size {asked} is a multiple of the engine's block size {unit}: states between its "
            f"boundaries are not stored, so some hits are lost; {unit} or no --chunk-size at all is better",
        )
    return asked, ()


def _unit_tokens(groups: Sequence[Group]) -> int:
    return math.lcm(*(group.block_tokens for group in groups if group.cacheable))


def _check_merged_budget(declaration: Declaration) -> None:
    """With one object group every chunk must carry its state, so each step must end on exactly one boundary."""
    if not any(group.kind is Kind.STATE for group in declaration.groups if group.cacheable):
        return
    unit, budget = _unit_tokens(declaration.groups), declaration.max_num_batched_tokens
    if not unit <= budget < 2 * unit:
        raise Refused(
            f"with --no-separate-object-groups a model with state needs max_num_batched_tokens in "
            f"[{unit}, {2 * unit}), but it is {budget}; start the engine with --max-num-batched-tokens {unit} "
            f"or the server without --no-separate-object-groups"
        )


def _object_groups(ranks: Sequence[Declaration], chunk: int, separate: bool) -> tuple[ObjectGroup, ...]:
    members: dict[tuple[Kind, int | None], list[int]] = {}
    for g, group in enumerate(ranks[0].groups):
        if group.cacheable:
            key = (group.kind, _reach_chunks(group, chunk)) if separate else (Kind.FULL, None)
            members.setdefault(key, []).append(g)
    if len(members) > MAX_OBJECT_GROUPS:
        raise Refused(f"the model needs {len(members)} object groups; at most {MAX_OBJECT_GROUPS} are served")
    keys = sorted(members, key=lambda key: (_KIND_ORDER.index(key[0]), key[1] or 0))
    return tuple(_object_group(ranks, chunk, key, members[key]) for key in keys)


def _object_group(
    ranks: Sequence[Declaration], chunk: int, key: tuple[Kind, int | None], members: Sequence[int]
) -> ObjectGroup:
    """Lay out one object: rank by rank, and within a rank group by group.

        | rank 0: group a | group b | rank 1: group a | group b | ...

    A replica has no bytes of its own and points to those of the rank that stores it.
    """
    groups = ranks[0].groups
    kept = [_kept_blocks(groups[g], chunk) for g in members]
    starts: dict[tuple[int, int], int] = {}
    end = 0
    for rank in ranks:
        for g, blocks in zip(members, kept, strict=True):
            if rank.shards[g].stored_by == rank.rank:
                starts[rank.rank, g] = end
                end += rank.shards[g].block_bytes * blocks
    kind, reach = key
    if end == 0:
        raise Refused(f"the {kind} groups {list(members)} have no bytes on any rank")
    return ObjectGroup(
        kind=kind,
        reach_chunks=reach,
        lookahead_chunks=int(any(groups[g].draft for g in members)),
        groups=tuple(members),
        kept_blocks=tuple(kept),
        object_bytes=end,
        offsets=tuple(tuple(starts[rank.shards[g].stored_by, g] for g in members) for rank in ranks),
        writes=tuple(tuple(rank.shards[g].stored_by == rank.rank for g in members) for rank in ranks),
    )


def _reach_chunks(group: Group, chunk: int) -> int | None:
    match group.kind:
        case Kind.FULL:
            return None
        case Kind.STATE:
            return 1
        case Kind.WINDOW:
            return max(1, -(-group.memory_tokens // chunk))


def _kept_blocks(group: Group, chunk: int) -> int:
    """Return how many trailing blocks of each chunk some boundary can need.

    A window shorter than a chunk ends at the boundary, so only the blocks it touches there are kept:

        | chunk                              |
        |        |bs|bs|   [ memory_tokens   ]
    """
    blocks = chunk // group.block_tokens
    match group.kind:
        case Kind.FULL:
            return blocks
        case Kind.STATE:
            return 1
        case Kind.WINDOW:
            return max(1, min(blocks, -(-group.memory_tokens // group.block_tokens)))


def _namespace(ranks: Sequence[Declaration], chunk: int, separate: bool) -> Namespace:
    first = ranks[0]
    content = (
        FORMAT_VERSION,
        sorted(first.identity.items()),
        first.groups,
        [(rank.pages, rank.shards) for rank in ranks],
        first.world,
        chunk,
        separate,
        first.hash_block_tokens,
    )
    return Namespace(hashlib.sha256(msgspec.msgpack.encode(content)).digest()[:16])
