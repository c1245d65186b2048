"""Small geometries for tests of the scheduler half: two ranks' worth of nothing, sizes that can be checked by hand."""

from kvmosaic.core.types import Kind
from kvmosaic.layout.groups import Geometry, Group, ObjectGroup


def hybrid(chunk_tokens: int = 8) -> Geometry:
    """Full (block 4), window of 4 tokens (block 2), state (block 8), one object group each, hash block 2."""
    groups = (
        Group(Kind.FULL, block_tokens=4),
        Group(Kind.WINDOW, block_tokens=2, memory_tokens=3),
        Group(Kind.STATE, block_tokens=8),
    )
    kept = (chunk_tokens // 4, 2, 1)
    reach = (None, 1, 1)
    object_groups = tuple(
        ObjectGroup(
            kind=group.kind,
            reach_chunks=reach[number],
            lookahead_chunks=0,
            groups=(number,),
            kept_blocks=(kept[number],),
            object_bytes=16 * kept[number],
            offsets=((0,),),
            writes=((True,),),
        )
        for number, group in enumerate(groups)
    )
    return Geometry("tiny", b"n" * 16, chunk_tokens, groups, object_groups, world=1, hash_block_tokens=2)


def full_only(chunk_tokens: int = 8) -> Geometry:
    """One full group with blocks of 4 tokens."""
    groups = (Group(Kind.FULL, block_tokens=4),)
    kept = chunk_tokens // 4
    object_group = ObjectGroup(Kind.FULL, None, 0, (0,), (kept,), 16 * kept, ((0,),), ((True,),))
    return Geometry("tiny", b"f" * 16, chunk_tokens, groups, (object_group,), world=1, hash_block_tokens=2)
