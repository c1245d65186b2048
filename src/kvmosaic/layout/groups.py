"""Groups as an engine declares them, one declaration a rank. Values only; they travel on the wire.

Called by the worker half (builds them) and the server (composes them into a Geometry). Does no I/O.
"""

from __future__ import annotations

import msgspec

from kvmosaic.core.types import Kind


class Group(msgspec.Struct, frozen=True):
    """One KV cache group of the engine: layers that share a block table and a spec.

    `memory_tokens` is how many tokens before a boundary a window group must keep (window - 1 + extra);
    0 for the other kinds. `draft` marks a group with draft layers, whose last page depends on the next token.
    A group that is not `cacheable` is skipped everywhere.
    """

    kind: Kind
    block_tokens: int
    memory_tokens: int = 0
    draft: bool = False
    cacheable: bool = True


class Shard(msgspec.Struct, frozen=True):
    """What one rank holds of one group.

    `block_bytes` is the payload of one block over all pages of the group on this rank, padding excluded
    (0 when the group is empty there). `stored_by` is the rank whose bytes stand for this rank's: the rank
    itself, or the first rank of its replica set.
    """

    block_bytes: int
    stored_by: int


class Declaration(msgspec.Struct, frozen=True):
    """What one rank of an engine says at registration.

    `identity` holds every field that makes bytes comparable, by name; it must be equal on all ranks. `pages`
    describes this rank's own page layout and goes into the namespace in rank order.
    `max_num_batched_tokens` is only needed to check merged object groups.
    """

    rank: int
    world: int
    model: str
    groups: tuple[Group, ...]
    shards: tuple[Shard, ...]
    identity: dict[str, str]
    pages: str
    max_num_batched_tokens: int
    hash_block_tokens: int


class ObjectGroup(msgspec.Struct, frozen=True):
    """The groups of one kind and reach, stored and moved as one object per chunk.

    `reach_chunks` is how many chunks before a boundary are needed, None for all. `lookahead_chunks` is 1 with
    draft layers: the chunk after the boundary must be present too. For position i in `groups`:
    `kept_blocks[i]` trailing blocks of each chunk are stored, and rank r finds them at `offsets[r][i]` in the
    object; `writes[r][i]` says whether rank r is the one that stores them.
    """

    kind: Kind
    reach_chunks: int | None
    lookahead_chunks: int
    groups: tuple[int, ...]
    kept_blocks: tuple[int, ...]
    object_bytes: int
    offsets: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[bool, ...], ...]


class Geometry(msgspec.Struct, frozen=True):
    """How one engine's KV cache is cut into chunks and objects."""

    model: str
    namespace: bytes
    chunk_tokens: int
    groups: tuple[Group, ...]
    object_groups: tuple[ObjectGroup, ...]
    world: int
    hash_block_tokens: int
    warnings: tuple[str, ...] = ()
