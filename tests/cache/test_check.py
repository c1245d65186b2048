"""The cache's check() sees what no verb would do."""

from collections.abc import Callable

import pytest

from kvmosaic.cache.cache import Cache
from tests.cache.builders import FULL, SPACE, cache_of, chain, digests, look, reserve, store


def _forget_a_write(cache: Cache) -> None:
    cache._reservations._held.popitem()


def _forget_a_lease(cache: Cache) -> None:
    cache._leases._leases.clear()


def _leak_extents(cache: Cache) -> None:
    assert cache._pool.allocate(1) is not None


def _free_too_early(cache: Cache) -> None:
    (entry,) = cache._indexes[SPACE].find(digests("a"), 0)
    cache._pool.free(entry.extents[0])


def _forget_a_leaf(cache: Cache) -> None:
    cache._evictor._leaves.clear()


def _write_without_reservation(cache: Cache) -> None:
    (entry,) = cache._indexes[SPACE].find(digests("a"), 0)
    entry.writing = 0b10


@pytest.mark.parametrize(
    "corrupt",
    [_forget_a_write, _forget_a_lease, _leak_extents, _free_too_early, _forget_a_leaf, _write_without_reservation],
)
def test_check_notices_what_no_verb_would_do(corrupt: Callable[[Cache], None]) -> None:
    cache = cache_of(FULL)
    store(cache, chain("abc"), chain("xyz"))
    reserve(cache, chain("abcd"))
    look(cache, "ab")
    cache.check()
    corrupt(cache)
    with pytest.raises(AssertionError):
        cache.check()
