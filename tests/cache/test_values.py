"""Digests and extents as they travel."""

import pytest

from kvmosaic.cache.values import PackedDigests, pack_objects
from kvmosaic.core.types import pack_extents
from kvmosaic.errors import RemoteProtocolError


def test_packed_digests_are_a_sequence_of_digests() -> None:
    packed = PackedDigests(b"aabbccdd", 2)
    assert len(packed) == 4
    assert list(packed) == [b"aa", b"bb", b"cc", b"dd"]
    assert (packed[0], packed[3], packed[-1]) == (b"aa", b"dd", b"dd")
    assert packed[1:3] == [b"bb", b"cc"]
    assert list(PackedDigests(b"", 2)) == []
    with pytest.raises(IndexError):
        packed[4]


@pytest.mark.parametrize(("packed", "digest_bytes"), [(b"aab", 2), (b"aa", 0), (b"aa", -1)])
def test_bytes_that_are_no_digests_are_the_peers_fault(packed: bytes, digest_bytes: int) -> None:
    with pytest.raises(RemoteProtocolError):
        PackedDigests(packed, digest_bytes)


def test_objects_are_packed_with_the_number_of_their_extents() -> None:
    one, two = pack_extents([(0, 4096)]), pack_extents([(4096, 4096), (16384, 8192)])
    assert pack_objects([]) == (b"", b"")
    assert pack_objects([one, one]) == (one + one, b"\1\0\0\0\1\0\0\0")
    assert pack_objects([one, two]) == (one + two, b"\1\0\0\0\2\0\0\0")
    assert pack_objects([two, one, one]) == (two + one + one, b"\2\0\0\0\1\0\0\0\1\0\0\0")
