"""The stories the cache was made for: what its users do at the worst moment."""

from kvmosaic.cache.cache import Cache
from kvmosaic.cache.values import Hit, Miss
from kvmosaic.core.types import Kind, Namespace, unpack_extents
from kvmosaic.memory.extents import ExtentPool
from tests.cache.builders import (
    ENGINE,
    FULL,
    GRANTED,
    NO_ROOM,
    NOT_WORTH_IT,
    OTHER,
    QUANTUM,
    SPACE,
    boundary_of,
    cache_of,
    chain,
    geometry_of,
    look,
    object_group,
    objects_of,
    outcomes,
    pool_of,
    reserve,
    store,
    used_quanta,
)


def test_a_client_dies_between_reserve_and_commit() -> None:
    cache = cache_of(FULL, quanta=4)
    dead = reserve(cache, chain("abcd"))
    assert reserve(cache, chain("x"), engine=OTHER).outcomes == outcomes(NO_ROOM)
    cache.bury(ENGINE)
    assert used_quanta(cache) == 0
    assert look(cache, "abcd") == Miss(0)
    assert store(cache, chain("abcd"), engine=OTHER) == 4
    assert cache.commit(ENGINE, dead.id, b"\1\1\1\1", 0.0) == 0
    cache.check()


def test_a_client_dies_with_leases() -> None:
    cache = cache_of(FULL, quanta=4)
    store(cache, chain("ab"))
    look(cache, "ab", request="first")
    look(cache, "ab", request="second")
    look(cache, "ab", engine=OTHER)
    cache.bury(ENGINE)
    assert cache.stats().leases == 1
    cache.release(OTHER, "request")
    assert reserve(cache, chain("wxyz"), now=1.0).outcomes == outcomes(*[GRANTED] * 4)
    cache.check()


def test_a_clear_leaves_leased_bytes_in_place_until_they_are_released() -> None:
    cache = cache_of(FULL, quanta=16)
    store(cache, chain("abcd"), chain("xyz"))
    hit = look(cache, "abcd")
    assert isinstance(hit, Hit)
    assert cache.clear(SPACE) == 7
    assert look(cache, "abcd", request="later") == Miss(0)
    assert used_quanta(cache) == 4
    cache.check()
    assert store(cache, chain("abcd")) == 4
    again = look(cache, "abcd", request="later")
    assert isinstance(again, Hit)
    assert not set(unpack_extents(again.extents[0])) & set(unpack_extents(hit.extents[0]))
    cache.release(ENGINE, "request")
    assert used_quanta(cache) == 4
    cache.check()


def test_a_clear_ends_reservations_but_frees_them_only_when_their_writer_is_done() -> None:
    cache = cache_of(FULL, quanta=8)
    old = reserve(cache, chain("abcd"))
    assert cache.clear() == 0
    assert used_quanta(cache) == 4
    new = reserve(cache, chain("abcd"))
    assert new.outcomes == outcomes(*[GRANTED] * 4)
    cache.check()
    assert cache.commit(ENGINE, old.id, b"\1\1\1\1", 0.0) == 0
    assert cache.stats().counters.late_commits == 1
    assert used_quanta(cache) == 4
    assert look(cache, "abcd") == Miss(0)
    assert cache.commit(ENGINE, new.id, b"\1\1\1\1", 0.0) == 4
    assert boundary_of(cache, "abcd") == 4
    cache.check()


def test_a_clear_of_one_namespace_leaves_the_others() -> None:
    cache = cache_of(FULL)
    other = Namespace(b"o" * 16)
    cache.open(other, geometry_of(FULL))
    store(cache, chain("abc"))
    assert cache.clear(other) == 0
    assert boundary_of(cache, "abc") == 3
    assert cache.clear() == 3
    assert [one.generation for one in cache.stats().namespaces] == [1, 2]


def test_an_engine_stopped_with_leases_does_not_hold_the_arena() -> None:
    cache = cache_of(FULL, quanta=16)
    for prompt in ("a" * 8, "b" * 8):
        store(cache, chain(prompt))
    for prompt in ("a" * 8, "b" * 8):
        look(cache, prompt, request=prompt)
    assert reserve(cache, chain("x" * 8), engine=OTHER, now=9.0).outcomes == outcomes(*[GRANTED] * 8)


def test_memory_that_is_not_resident_yet_is_not_used() -> None:
    pool = ExtentPool(8 * QUANTUM, QUANTUM)
    cache = Cache(pool)
    cache.open(SPACE, geometry_of(FULL))
    assert reserve(cache, chain("ab")).outcomes == outcomes(NO_ROOM, NOT_WORTH_IT)
    pool.grow(QUANTUM)
    assert reserve(cache, chain("ab")).outcomes == outcomes(GRANTED, NO_ROOM)
    cache.check()


def test_an_object_larger_than_all_there_is_evicts_nothing() -> None:
    cache = Cache(pool_of(4))
    cache.open(SPACE, geometry_of(FULL))
    store(cache, chain("abcd"))
    large = Namespace(b"l" * 16)
    cache.open(large, geometry_of(object_group(Kind.FULL, None, 5 * QUANTUM)))
    assert cache.reserve(ENGINE, large, [chain("x")], 1.0).outcomes == outcomes(NO_ROOM)
    assert objects_of(cache) == (4,)
