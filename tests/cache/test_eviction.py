"""What goes first when there is no room, and what is worth keeping."""

import pytest

from kvmosaic.cache.cache import Cache
from kvmosaic.cache.entry import Entry, Shape
from kvmosaic.cache.eviction import LRU, Evictor, Policy
from kvmosaic.cache.values import Hit
from kvmosaic.core.effects import Evicted
from kvmosaic.core.types import Digest, Extents
from tests.cache.builders import (
    ENGINE,
    FULL,
    OTHER,
    SPACE,
    STATE,
    boundary_of,
    cache_of,
    chain,
    digests,
    geometry_of,
    look,
    objects_of,
    reserve,
    store,
    use,
    window,
)

LONG = "".join(chr(ord("A") + i) for i in range(100))


def make_room(cache: Cache, num_objects: int, now: float = 1_000.0) -> list[tuple[bytes, int]]:
    """Store so many chunks of an unrelated prompt; return (digest, object group) of what had to go for it."""
    cache.take_effects()
    reservation = reserve(cache, chain("z" * num_objects), engine=OTHER, now=now)
    effects = cache.take_effects()
    cache.commit(OTHER, reservation.id, bytes(len(reservation.objects)), now)
    cache.check()
    return [(effect.digest, effect.object_group) for effect in effects if isinstance(effect, Evicted)]


def fill(cache: Cache, num_objects: int) -> None:
    """Take room away for good: an engine writes it and never commits."""
    reserve(cache, chain("~" * num_objects), engine=OTHER)


# Chains.


def test_half_of_a_chain_stored_in_batches_is_evicted_and_the_other_half_is_served() -> None:
    cache = cache_of(FULL, quanta=100)
    for at in range(0, 100, 10):
        store(cache, chain(LONG[: at + 10], first=at), now=at)
    assert boundary_of(cache, LONG) == 100
    gone = make_room(cache, 50)
    assert [digest for digest, _ in gone] == digests(LONG)[:49:-1]
    assert boundary_of(cache, LONG) == 50
    assert objects_of(cache) == (50,)


def test_the_chain_used_least_recently_goes_first() -> None:
    cache = cache_of(FULL, quanta=12)
    for now, prompt in enumerate(("aaaa", "bbbb", "cccc")):
        store(cache, chain(prompt), now=now)
    use(cache, "aaaa", now=5)
    make_room(cache, 5)
    assert [boundary_of(cache, prompt) for prompt in ("aaaa", "bbbb", "cccc")] == [4, 0, 3]


def test_a_chain_that_is_stored_again_counts_as_used() -> None:
    cache = cache_of(FULL, quanta=8)
    store(cache, chain("aaaa"), now=1)
    store(cache, chain("bbbb"), now=2)
    store(cache, chain("aaaa"), now=3)
    make_room(cache, 4)
    assert boundary_of(cache, "aaaa") == 4


def test_a_chain_is_as_recent_as_its_commit() -> None:
    cache = cache_of(FULL, quanta=4)
    reservation = reserve(cache, chain("aa"), now=1)
    store(cache, chain("bb"), now=2)
    cache.commit(ENGINE, reservation.id, b"\1\1", 3)
    assert make_room(cache, 2) == [(b"bb", 0), (b"b", 0)]


def test_room_for_an_object_is_not_made_by_evicting_its_own_chunk() -> None:
    cache = cache_of(FULL, STATE, quanta=2)
    store(cache, chain("a"), now=1)
    store(cache, chain("b"), now=2)
    assert store(cache, chain("a", wanted=0b11), now=3) == 1
    assert objects_of(cache) == (1, 1)
    cache.check()


def test_a_shared_prefix_is_as_recent_as_its_most_recent_user() -> None:
    cache = cache_of(FULL, quanta=9)
    store(cache, chain("ssa"), now=1)
    store(cache, chain("bbbb"), now=2)
    store(cache, chain("ssc"), now=3)
    use(cache, "ssa", now=10)
    gone = make_room(cache, 6, now=20)
    assert [digest for digest, _ in gone] == [b"bbbb", b"bbb", b"bb", b"b", b"ssc"]
    gone = make_room(cache, 9, now=30)
    assert [digest for digest, _ in gone] == [b"ssa", b"ss", b"s"]


def test_a_prefix_left_by_its_users_is_as_recent_as_they_were() -> None:
    cache = cache_of(FULL, quanta=64)
    fill(cache, 58)
    store(cache, chain("ss"), now=1)
    store(cache, chain("bbb"), now=2)
    look(cache, "bbb", now=3)
    store(cache, chain("ssa"), now=4)
    assert make_room(cache, 1) == [(b"ssa", 0)]
    cache.release(ENGINE, "request")
    assert make_room(cache, 2) == [(b"bbb", 0)]


def test_a_boundary_used_in_the_middle_of_a_chain_outlives_the_rest_of_it() -> None:
    cache = cache_of(FULL, quanta=8)
    store(cache, chain("aaaa"), now=1)
    store(cache, chain("bbbb"), now=2)
    use(cache, "aa", now=3)
    make_room(cache, 6)
    assert [boundary_of(cache, prompt) for prompt in ("aaaa", "bbbb")] == [2, 0]


def test_a_chain_that_is_being_written_keeps_its_parents() -> None:
    cache = cache_of(FULL, quanta=4)
    store(cache, chain("ab"))
    reserve(cache, chain("abc", first=2))
    assert make_room(cache, 4) == []
    assert boundary_of(cache, "ab") == 2


# States.


def test_a_state_goes_with_the_full_chunks_since_the_state_before_it() -> None:
    cache = cache_of(FULL, STATE, quanta=12)
    store(cache, chain("aaaaaaaaaa", wanted=[1, 1, 1, 3, 1, 1, 1, 1, 1, 3]))
    assert boundary_of(cache, "aaaaaaaaaa") == 10
    gone = make_room(cache, 1)
    assert len(gone) == 7
    assert gone[:2] == [(b"a" * 10, 0), (b"a" * 10, 1)]
    assert boundary_of(cache, "aaaaaaaaaa") == 4
    assert objects_of(cache) == (4, 1)


def test_half_of_a_chain_with_states_leaves_a_prefix_that_ends_with_a_state() -> None:
    cache = cache_of(FULL, STATE, quanta=110)
    for at in range(0, 100, 10):
        store(cache, chain(LONG[: at + 10], first=at, wanted=[1] * 9 + [3]), now=at)
    make_room(cache, 55)
    assert boundary_of(cache, LONG) == 50
    assert objects_of(cache) == (50, 5)


def test_chunks_that_were_used_more_recently_do_not_go_with_a_state() -> None:
    cache = cache_of(FULL, STATE, quanta=6)
    store(cache, chain("aaaa", wanted=[1, 1, 1, 3]), now=1)
    store(cache, chain("aa"), now=9)
    make_room(cache, 2, now=20)
    assert objects_of(cache) == (2, 0)


def test_the_part_of_a_chain_that_other_prompts_share_stays_when_a_state_goes() -> None:
    cache = cache_of(FULL, STATE, quanta=9)
    store(cache, chain("aaaa", wanted=[1, 1, 1, 3]), now=1)
    store(cache, chain("aaxy", wanted=[1, 1, 1, 3]), now=2)
    make_room(cache, 2)
    assert boundary_of(cache, "aaaa") == 0
    assert boundary_of(cache, "aaxy") == 4


# Windows.


def test_window_objects_outside_every_reach_go_first() -> None:
    cache = cache_of(FULL, window(2), quanta=20)
    store(cache, chain("a" * 10, wanted=3))
    gone = make_room(cache, 8)
    assert gone == [(b"a" * length, 1) for length in range(1, 9)]
    assert boundary_of(cache, "a" * 10) == 10
    assert objects_of(cache) == (10, 2)


def test_window_objects_stay_within_reach_while_their_chain_grows() -> None:
    cache = cache_of(FULL, window(2), quanta=20)
    for at in range(0, 10, 2):
        store(cache, chain("a" * (at + 2), first=at, wanted=3), now=at)
    reserve(cache, chain("a" * 11, first=10), now=10)
    assert len(make_room(cache, 9)) == 7
    assert boundary_of(cache, "a" * 10) == 10


def test_a_window_stays_where_prompts_part() -> None:
    cache = cache_of(FULL, window(1), quanta=64)
    store(cache, chain("ssssa", wanted=3), chain("ssssb", wanted=3))
    store(cache, chain("aaaaa", wanted=3))
    fill(cache, 64 - 22)
    gone = make_room(cache, 7)
    assert {digest for digest, g in gone if g == 1} == {b"s", b"ss", b"sss", b"a", b"aa", b"aaa", b"aaaa"}
    assert boundary_of(cache, "ssssc") == 4
    assert boundary_of(cache, "aaaac") == 0


def test_a_window_goes_when_prompts_no_longer_part_there() -> None:
    cache = cache_of(FULL, window(1), quanta=6)
    store(cache, chain("sa", wanted=3), now=1)
    store(cache, chain("sb", wanted=3), now=2)
    assert make_room(cache, 2, now=3) == [(b"sa", 0), (b"sa", 1)]
    assert make_room(cache, 3, now=4) == [(b"s", 1)]
    assert boundary_of(cache, "sb") == 2


def test_a_window_stays_where_a_state_is() -> None:
    cache = cache_of(FULL, window(1), STATE, quanta=10)
    store(cache, chain("aaaa", wanted=[3, 7, 3, 7]))
    assert make_room(cache, 2) == [(b"a", 1), (b"aaa", 1)]
    assert boundary_of(cache, "aaa") == 2


def test_a_window_stays_while_it_is_leased() -> None:
    cache = cache_of(FULL, window(1), quanta=64)
    store(cache, chain("aaaa", wanted=3))
    fill(cache, 56)
    assert isinstance(look(cache, "aa"), Hit)
    assert make_room(cache, 2) == [(b"a", 1), (b"aaa", 1)]
    cache.release(ENGINE, "request")
    assert make_room(cache, 3) == [(b"aa", 1)]


def test_window_objects_that_come_late_go_first_too() -> None:
    cache = cache_of(FULL, window(1), quanta=8)
    store(cache, chain("aaaa", wanted=[1, 1, 1, 3]))
    store(cache, chain("aaaa", wanted=3))
    assert make_room(cache, 3) == [(b"a", 1), (b"aa", 1), (b"aaa", 1)]


def test_a_chain_whose_windows_are_gone_goes_as_a_whole_when_its_end_does() -> None:
    cache = cache_of(FULL, window(2), quanta=20)
    store(cache, chain("a" * 10, wanted=3))
    make_room(cache, 8)
    make_room(cache, 9)
    assert objects_of(cache) == (0, 0)


# The policy and its queue.


class FIFO:
    """The chain stored first goes first."""

    def stamp(self, entry: Entry, now: float) -> float:
        return entry.stamp


def leaf(name: bytes, shape: Shape, now: float = 0.0) -> Entry:
    entry = Entry(shape, Digest(name), None, now)
    entry.present, entry.extents[0] = 1, Extents(b"x" * 16)
    return entry


@pytest.mark.parametrize(("policy", "order"), [(LRU(), b"bca"), (FIFO(), b"abc")])
def test_the_policy_chooses_among_leaves(policy: Policy, order: bytes) -> None:
    evictor = Evictor(policy)
    shape = Shape.of(SPACE, geometry_of(FULL))
    a, b, c = (leaf(name, shape, now) for now, name in enumerate((b"a", b"b", b"c")))
    for entry in (a, b, c):
        evictor.offer(entry)
    evictor.use(a, 4.0)
    evictor.check([a, b, c])
    chosen = [evictor.next_leaf() for _ in range(3)]
    assert b"".join(entry.digest for entry in chosen if entry is not None) == order
    assert evictor.next_leaf() is None


def test_entries_that_were_cleared_are_not_kept() -> None:
    cache = cache_of(FULL, window(1))
    store(cache, chain("aaa", wanted=3))
    look(cache, "aaa")
    cache.clear()
    assert cache._evictor._leaves == []
    assert not cache._evictor._windows


def test_leaves_in_use_are_passed_over() -> None:
    evictor = Evictor(LRU())
    shape = Shape.of(SPACE, geometry_of(FULL))
    read, written, gone, free = (leaf(name, shape) for name in (b"r", b"w", b"g", b"f"))
    for entry in (read, written, gone, free):
        evictor.offer(entry)
    read.leases, written.writing, gone.gone = 1, 1, True
    assert evictor.next_leaf() is free
    assert evictor.next_leaf() is None
    read.leases = 0
    with pytest.raises(AssertionError, match="would never go"):
        evictor.check([read])
    evictor.offer(read)
    assert evictor.next_leaf() is read
