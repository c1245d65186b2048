"""The cache's verbs."""

from dataclasses import replace

import pytest

from kvmosaic.cache.values import Hit, Miss
from kvmosaic.core.effects import Evicted, Stored
from kvmosaic.core.types import EngineKey, Kind, Namespace, ReservationId, unpack_extents
from kvmosaic.errors import RemoteProtocolError
from tests.cache.builders import (
    ENGINE,
    FULL,
    GRANTED,
    NO_ROOM,
    NOT_WORTH_IT,
    OTHER,
    PRESENT,
    QUANTUM,
    SPACE,
    STATE,
    boundary_of,
    cache_of,
    chain,
    digests,
    geometry_of,
    look,
    object_group,
    outcomes,
    reserve,
    store,
    used_quanta,
    window,
)

# Two phases.


def test_what_was_committed_is_found_with_the_extents_that_were_written() -> None:
    cache = cache_of(FULL)
    reservation = reserve(cache, chain("abc"))
    assert reservation.outcomes == outcomes(GRANTED, GRANTED, GRANTED)
    assert cache.commit(ENGINE, reservation.id, b"\1\1\1", 0.0) == 3
    hit = look(cache, "abcd")
    assert hit == Hit(3, 3, (0,), (b"".join(reservation.objects),), (b"\1\0\0\0" * 3,))
    cache.check()


def test_nothing_is_seen_before_commit() -> None:
    cache = cache_of(FULL)
    reserve(cache, chain("abc"))
    assert look(cache, "abc") == Miss(0)
    cache.check()


def test_objects_that_were_not_written_stay_unseen_and_give_their_extents_back() -> None:
    cache = cache_of(FULL)
    reservation = reserve(cache, chain("abc"))
    assert cache.commit(ENGINE, reservation.id, b"\1\0\1", 0.0) == 2
    assert used_quanta(cache) == 2
    assert boundary_of(cache, "abc") == 1
    assert reserve(cache, chain("abc")).outcomes == outcomes(PRESENT, GRANTED, PRESENT)
    cache.check()


def test_a_chunk_that_is_here_or_being_written_is_not_written_twice() -> None:
    cache = cache_of(FULL)
    store(cache, chain("a"))
    reserve(cache, chain("ab"))
    again = reserve(cache, chain("abc"), engine=OTHER)
    assert again.outcomes == outcomes(PRESENT, PRESENT, GRANTED)
    assert len(again.objects) == 1
    cache.check()


def test_a_reservation_with_nothing_granted_has_no_id() -> None:
    cache = cache_of(FULL)
    store(cache, chain("a"))
    assert reserve(cache, chain("a")).id == 0
    assert reserve(cache).outcomes == b""


def test_a_chain_without_its_parent_is_not_worth_it() -> None:
    cache = cache_of(FULL)
    assert reserve(cache, chain("abc", first=1)).outcomes == outcomes(NOT_WORTH_IT, NOT_WORTH_IT)
    store(cache, chain("a"))
    assert reserve(cache, chain("abc", first=1)).outcomes == outcomes(GRANTED, GRANTED)
    cache.check()


def test_a_parent_at_another_chunk_is_none() -> None:
    cache = cache_of(FULL)
    store(cache, chain("abc"))
    wrong = chain("abcd", first=3)
    assert reserve(cache, replace(wrong, first_chunk=2)).outcomes == outcomes(NOT_WORTH_IT)
    assert reserve(cache, wrong).outcomes == outcomes(GRANTED)


def test_a_parent_without_its_full_object_is_none() -> None:
    cache = cache_of(FULL, STATE)
    reservation = reserve(cache, chain("a", wanted=0b11))
    assert reserve(cache, chain("ab", first=1)).outcomes == outcomes(GRANTED)
    cache.commit(ENGINE, reservation.id, b"\0\1", 0.0)
    assert reserve(cache, chain("ac", first=1)).outcomes == outcomes(NOT_WORTH_IT)
    assert reserve(cache, chain("ac")).outcomes == outcomes(GRANTED, GRANTED)
    cache.check()


def test_a_parent_in_the_same_reservation_is_enough() -> None:
    cache = cache_of(FULL)
    assert reserve(cache, chain("a"), chain("ab", first=1)).outcomes == outcomes(GRANTED, GRANTED)


def test_a_chunk_whose_full_object_is_neither_here_nor_wanted_is_not_worth_it() -> None:
    cache = cache_of(FULL, STATE)
    assert reserve(cache, chain("ab", wanted=0b10)).outcomes == outcomes(NOT_WORTH_IT, NOT_WORTH_IT)
    store(cache, chain("ab", wanted=0b01))
    assert reserve(cache, chain("ab", wanted=0b10)).outcomes == outcomes(GRANTED, GRANTED)
    cache.check()


def test_followers_of_a_full_object_without_room_are_not_worth_it() -> None:
    cache = cache_of(FULL, STATE, quanta=3)
    got = reserve(cache, chain("abc", wanted=0b11)).outcomes
    assert got == outcomes(GRANTED, GRANTED, GRANTED, NO_ROOM, NO_ROOM, NOT_WORTH_IT)
    cache.check()


def test_a_digest_that_belongs_elsewhere_ends_its_chain() -> None:
    cache = cache_of(FULL)
    store(cache, chain("abc"))
    wrong = chain("xyz")
    wrong = type(wrong)(0, b"", [b"x", b"ab", b"xyz"], wrong.wanted)
    assert reserve(cache, wrong).outcomes == outcomes(GRANTED, NOT_WORTH_IT, NOT_WORTH_IT)
    cache.check()


def test_wanted_masks_that_fit_no_object_are_the_peers_fault_and_change_nothing() -> None:
    cache = cache_of(FULL)
    with pytest.raises(RemoteProtocolError, match="object groups"):
        reserve(cache, chain("a"), chain("ab", wanted=0b10))
    with pytest.raises(RemoteProtocolError, match="masks"):
        reserve(cache, chain("ab", wanted=[1]))
    assert used_quanta(cache) == 0


def test_states_alone_are_stored_where_they_are() -> None:
    """A model without full groups: the chunks between its states hold nothing, but the chain goes on."""
    cache = cache_of(STATE)
    assert reserve(cache, chain("abcd", wanted=[0, 0, 0, 0])).id == 0
    assert store(cache, chain("abcd", wanted=[0, 1, 0, 1])) == 2
    assert boundary_of(cache, "abcd") == 4
    assert boundary_of(cache, "abc") == 2
    cache.check()


def test_unknown_and_foreign_commits_change_nothing() -> None:
    cache = cache_of(FULL)
    reservation = reserve(cache, chain("a"))
    assert cache.commit(OTHER, reservation.id, b"\1", 0.0) == 0
    assert cache.commit(ENGINE, ReservationId(77), b"\1", 0.0) == 0
    assert cache.stats().counters.unknown_commits == 2
    assert look(cache, "a") == Miss(0)
    assert cache.commit(ENGINE, reservation.id, b"\1", 0.0) == 1
    assert cache.commit(ENGINE, reservation.id, b"\1", 0.0) == 0
    cache.check()


def test_a_commit_that_does_not_fit_its_reservation_writes_nothing() -> None:
    cache = cache_of(FULL)
    reservation = reserve(cache, chain("ab"))
    assert cache.commit(ENGINE, reservation.id, b"\1", 0.0) == 0
    assert used_quanta(cache) == 0
    cache.check()


# Leases.


def test_a_hit_lists_what_each_group_needs() -> None:
    cache = cache_of(FULL, window(2), STATE)
    store(cache, chain("abcd", wanted=0b111))
    hit = look(cache, "abcd", first=1)
    assert isinstance(hit, Hit)
    assert (hit.boundary, hit.full_chunks, hit.first_chunks) == (4, 4, (1, 2, 3))
    assert [len(list(unpack_extents(extents))) for extents in hit.extents] == [3, 2, 1]
    assert [len(counts) // 4 for counts in hit.extent_counts] == [3, 2, 1]


def test_objects_of_several_extents_are_counted() -> None:
    cache = cache_of(object_group(Kind.FULL, None, 2 * QUANTUM), quanta=8)
    store(cache, chain("a"), chain("b"), chain("c"), chain("d"))
    cache._evict()
    cache._evict()
    other = Namespace(b"o" * 16)
    cache.open(other, geometry_of(object_group(Kind.FULL, None, QUANTUM)))
    reservation = cache.reserve(OTHER, other, [chain("x")], 1.0)
    cache.commit(OTHER, reservation.id, b"\1", 1.0)
    store(cache, chain("e"), now=2.0)
    hit = look(cache, "e")
    assert isinstance(hit, Hit)
    pieces = list(unpack_extents(hit.extents[0]))
    assert hit.extent_counts == (len(pieces).to_bytes(4, "little"),)
    assert sum(size for _, size in pieces) == 2 * QUANTUM
    cache.check()


def test_a_miss_still_says_how_deep_the_full_groups_go() -> None:
    cache = cache_of(FULL, STATE)
    store(cache, chain("abc", wanted=0b01))
    assert look(cache, "abc") == Miss(3)
    assert look(cache, "abc", first=1) == Miss(3)
    assert look(cache, "xyz") == Miss(0)


def test_digests_that_are_no_chain_are_a_miss() -> None:
    cache = cache_of(FULL)
    store(cache, chain("abc"))
    assert cache.lookup(ENGINE, "request", SPACE, 1, digests("abc"), 0.0) == Miss(1)
    assert cache.lookup(ENGINE, "request", SPACE, 0, [b"a", b"a", b"a"], 0.0) == Miss(0)
    assert len(cache._leases) == 0
    cache.check()


def test_draft_layers_lose_one_chunk_at_most() -> None:
    cache = cache_of(object_group(Kind.FULL, lookahead=1))
    store(cache, chain("abc"))
    assert boundary_of(cache, "abc") == 2
    assert boundary_of(cache, "abcd") == 2
    assert boundary_of(cache, "ab") == 1


def test_a_new_lookup_of_a_request_replaces_its_lease() -> None:
    cache = cache_of(FULL)
    store(cache, chain("abcd"))
    look(cache, "abcd")
    look(cache, "ab")
    assert cache.stats().leases == 1
    assert cache.stats().leased_bytes == 2 * QUANTUM
    look(cache, "xyz")
    assert cache.stats().leases == 0
    cache.check()


def test_what_is_leased_is_not_evicted() -> None:
    cache = cache_of(FULL, quanta=8)
    store(cache, chain("abcd"))
    look(cache, "abcd")
    assert reserve(cache, chain("x" * 6)).outcomes == outcomes(*[GRANTED] * 4, NO_ROOM, NOT_WORTH_IT)
    assert boundary_of(cache, "abcd") == 4
    cache.check()


def test_a_released_lease_protects_nothing() -> None:
    cache = cache_of(FULL, quanta=8)
    store(cache, chain("abcd"))
    look(cache, "abcd")
    cache.release(ENGINE, "request")
    cache.release(ENGINE, "request")
    assert reserve(cache, chain("x" * 6)).outcomes == outcomes(*[GRANTED] * 6)
    assert boundary_of(cache, "abcd") == 2
    cache.check()


def test_one_engine_may_lease_half_and_all_together_three_quarters() -> None:
    cache = cache_of(FULL, quanta=16)
    for prompt in ("a" * 10, "bbb", "ccc"):
        store(cache, chain(prompt))
    hit = look(cache, "a" * 10)
    assert isinstance(hit, Hit)
    assert (hit.boundary, hit.full_chunks) == (8, 10)
    assert isinstance(look(cache, "bbb", request="second"), Miss)
    other = look(cache, "bbb", engine=OTHER)
    assert isinstance(other, Hit)
    last = look(cache, "ccc", engine=EngineKey("third"))
    assert isinstance(last, Hit)
    assert (other.boundary, last.boundary) == (3, 1)
    assert cache.stats().counters.capped_leases == 3
    cache.check()


def test_a_capped_lease_ends_on_a_boundary_that_can_be_served() -> None:
    cache = cache_of(FULL, STATE, quanta=16)
    store(cache, chain("a" * 10, wanted=[1, 1, 3, 1, 1, 1, 1, 1, 3, 3]))
    hit = look(cache, "a" * 10)
    assert isinstance(hit, Hit)
    assert hit.boundary == 3
    cache.check()


def test_what_is_stored_on_a_leased_path_counts_as_leased() -> None:
    cache = cache_of(FULL, STATE)
    store(cache, chain("aaaa", wanted=[1, 1, 1, 3]))
    look(cache, "aaaa")
    store(cache, chain("aa", wanted=3))
    assert cache.stats().leased_bytes == 7 * QUANTUM
    cache.release(ENGINE, "request")
    assert cache.stats().leased_bytes == 0
    cache.check()


def test_a_shared_prefix_is_charged_once() -> None:
    cache = cache_of(FULL, quanta=16)
    store(cache, chain("a" * 7))
    for i in range(20):
        assert isinstance(look(cache, "a" * 7, request=f"request {i}"), Hit)
    assert cache.stats().leased_bytes == 7 * QUANTUM
    for i in range(20):
        cache.release(ENGINE, f"request {i}")
    assert cache.stats().leased_bytes == 0
    cache.check()


# Effects and statistics.


def test_effects_say_what_can_be_found_now() -> None:
    cache = cache_of(FULL, quanta=2)
    reservation = reserve(cache, chain("ab"))
    assert cache.take_effects() == []
    cache.commit(ENGINE, reservation.id, b"\1\1", 0.0)
    first, second = reservation.objects
    assert cache.take_effects() == [
        Stored(SPACE, digests("ab")[0], 0, QUANTUM, first),  # type: ignore[arg-type]  # plain bytes in tests
        Stored(SPACE, digests("ab")[1], 0, QUANTUM, second),  # type: ignore[arg-type]  # plain bytes in tests
    ]
    reserve(cache, chain("x"), now=1.0)
    assert [effect.digest for effect in cache.take_effects() if isinstance(effect, Evicted)] == [b"ab"]
    assert cache.take_effects() == []


def test_statistics_are_those_of_a_known_workload() -> None:
    cache = cache_of(FULL, STATE)
    store(cache, chain("abc", wanted=[1, 1, 3]))
    store(cache, chain("abc"))
    look(cache, "abc")
    look(cache, "xyz", request="other")
    reserve(cache, chain("z"))
    stats = cache.stats()
    (one,) = stats.namespaces
    assert (one.objects, one.object_bytes) == ((3, 1), (3 * QUANTUM, QUANTUM))
    assert (one.lookups, one.hits, one.hit_chunks) == (2, 1, 3)
    assert (one.leases, one.reservations, one.generation) == (1, 1, 0)
    assert (stats.objects, stats.object_bytes) == (4, 4 * QUANTUM)
    assert (stats.leases, stats.leased_bytes) == (1, 4 * QUANTUM)
    assert (stats.reservations, stats.reserved_bytes) == (1, QUANTUM)
    assert (stats.counters.committed_objects, stats.counters.present_objects) == (4, 3)
    cache.commit(ENGINE, ReservationId(2), b"\0", 0.0)
    assert stats.counters.aborted_objects == 0
    assert cache.stats().counters.aborted_objects == 1


def test_opening_a_namespace_again_changes_nothing() -> None:
    cache = cache_of(FULL)
    store(cache, chain("abc"))
    cache.open(SPACE, geometry_of(FULL, model="other"))
    assert boundary_of(cache, "abc") == 3


def test_namespaces_do_not_see_each_other() -> None:
    cache = cache_of(FULL)
    other = Namespace(b"o" * 16)
    cache.open(other, geometry_of(FULL))
    store(cache, chain("abc"))
    assert cache.lookup(ENGINE, "request", other, 0, digests("abc"), 0.0) == Miss(0)
