"""Leases pin paths, each entry once; reservations belong to one engine."""

import pytest

from kvmosaic.cache.entry import Entry
from kvmosaic.cache.leases import Held, Leases, Reservations
from kvmosaic.core.types import EngineKey, Extents
from tests.cache.builders import ENGINE, OTHER, SPACE
from tests.cache.test_index import grow, index_of

BYTES = 16 << 10
ROOM = 1_000 * BYTES


def path(prompt: str = "abcdef", at: int = 6) -> tuple[Entry, list[Entry]]:
    index = index_of(prompt)
    tail = grow(index, prompt[:at])
    return tail, list(tail.path(at))


def test_a_lease_pins_the_path_to_its_tail() -> None:
    leases = Leases()
    tail, entries = path(at=4)
    assert leases.take(ENGINE, "request", tail, ROOM) == 4
    assert all(entry.pins == 1 for entry in entries)
    assert (tail.leases, tail.child is not None and tail.child.pins) == (1, 0)
    assert leases.pinned_bytes == 4 * BYTES
    leases.check()


def test_paths_that_share_entries_pin_them_once() -> None:
    index = index_of("aabb", "aacc")
    leases = Leases()
    first, second = grow(index, "aabb"), grow(index, "aacc")
    leases.take(ENGINE, "first", first, ROOM)
    leases.take(OTHER, "second", second, ROOM)
    leases.take(OTHER, "third", second, ROOM)
    assert leases.pinned_bytes == 6 * BYTES
    leases.check()
    assert leases.drop(ENGINE, "first") == (first, list(first.path(2)))
    assert leases.drop(OTHER, "second") == (second, [])
    assert leases.pinned_bytes == 4 * BYTES
    leases.check()
    assert leases.drop(OTHER, "third") == (second, list(second.path(4)))
    assert leases.pinned_bytes == 0
    leases.check()


def test_dropping_what_is_not_leased_is_nothing() -> None:
    assert Leases().drop(ENGINE, "request") is None


@pytest.mark.parametrize(("arena_objects", "allowed"), [(12, 6), (11, 5), (8, 4), (3, 1), (1, 0)])
def test_one_engine_pins_half_at_most(arena_objects: int, allowed: int) -> None:
    leases = Leases()
    tail, entries = path()
    assert leases.take(ENGINE, "request", tail, arena_objects * BYTES) == allowed
    if allowed < 6:
        assert leases.pinned_bytes == len(leases) == sum(entry.pins for entry in entries) == 0
    leases.check()


def test_what_others_pinned_is_free_of_charge() -> None:
    leases = Leases()
    tail, _ = path()
    assert leases.take(ENGINE, "request", tail, 12 * BYTES) == 6
    assert leases.take(OTHER, "request", tail, 12 * BYTES) == 6
    assert leases.pinned_bytes == 6 * BYTES


def test_leases_are_found_by_engine() -> None:
    leases = Leases()
    tail, _ = path()
    for engine, request in ((ENGINE, "first"), (OTHER, "second"), (ENGINE, "third")):
        leases.take(engine, request, tail, ROOM)
    assert leases.requests(ENGINE) == ["first", "third"]
    assert leases.requests(EngineKey("none")) == []
    assert leases.tails() == [tail] * 3


def test_check_notices_wrong_pins() -> None:
    leases = Leases()
    tail, entries = path()
    leases.take(ENGINE, "request", tail, ROOM)
    for change in (1, -1):
        entries[2].pins += change
        with pytest.raises(AssertionError, match="pins"):
            leases.check()
        entries[2].pins -= change
    leases.check()
    leases.pinned_bytes += 1
    with pytest.raises(AssertionError, match="bytes"):
        leases.check()


def test_a_reservation_is_ended_once_and_only_by_its_engine() -> None:
    reservations = Reservations()
    tail, _ = path()
    held = Held(ENGINE, SPACE, 0, [(tail, 0, Extents(b"")), (tail, 1, Extents(b""))])
    first, second = reservations.add(held), reservations.add(held)
    assert first != second
    assert 0 not in (first, second)
    assert reservations.reserved_bytes == 4 * BYTES
    assert reservations.end(OTHER, first) is None
    assert reservations.end(ENGINE, first) is held
    assert reservations.end(ENGINE, first) is None
    assert reservations.of(ENGINE) == [second]
    assert reservations.of(OTHER) == []
    assert reservations.all() == [held]
    assert (len(reservations), reservations.reserved_bytes) == (1, 2 * BYTES)
