"""The index finds the known part of a prompt and stays a tree."""

import pytest

from kvmosaic.cache.entry import Entry
from kvmosaic.cache.index import Index
from kvmosaic.core.types import Extents
from tests.cache.builders import FULL, SPACE, STATE, digests, geometry_of

EXTENTS = Extents(b"x" * 16)


def index_of(*prompts: str) -> Index:
    index = Index(SPACE, geometry_of(FULL, STATE))
    for prompt in prompts:
        grow(index, prompt)
    return index


def grow(index: Index, prompt: str) -> Entry:
    entry: Entry | None = None
    for digest in digests(prompt):
        entry = index.grow(digest, entry, 0.0)
        assert entry is not None
        if not entry.present:
            index.put(entry, 0, EXTENTS)
    assert entry is not None
    return entry


def names(entries: list[Entry]) -> list[bytes]:
    return [entry.digest for entry in entries]


@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize("known", range(5))
def test_the_known_part_of_a_prompt_is_found(known: int, first: int) -> None:
    index = index_of("abcd"[:known]) if known else index_of()
    assert names(index.find(digests("abcdxy")[first:], first)) == digests("abcd")[first:known]


def test_digests_at_the_wrong_chunk_lead_nowhere() -> None:
    index = index_of("abcd", "axy")
    assert index.find(digests("abcd"), 1) == []
    assert index.find([b"a", b"axy"], 0) == []
    assert index.find([], 0) == []


def test_an_entry_is_made_once_and_belongs_to_one_parent() -> None:
    index = index_of("ab")
    first = index.get(b"a")
    assert index.grow(b"ab", first, 0.0) is index.get(b"ab")
    assert index.grow(b"ab", None, 0.0) is None
    assert index.grow(b"a", first, 0.0) is None
    assert len(index) == 2


def test_children_come_and_go_in_any_order() -> None:
    index = index_of("sa", "sb", "sc", "sd")
    parent = index.get(b"s")
    assert parent is not None
    for name, left in ((b"sb", {b"sa", b"sc", b"sd"}), (b"sd", {b"sa", b"sc"}), (b"sa", {b"sc"}), (b"sc", set())):
        entry = index.get(name)
        assert entry is not None
        index.take(entry, 0)
        index.remove(entry)
        assert {child.digest for child in parent.children()} == left
        index.check()
    assert parent.child is None


def test_objects_are_counted() -> None:
    index = index_of("abc")
    entry = index.get(b"abc")
    assert entry is not None
    index.put(entry, 1, EXTENTS)
    assert index.objects == [3, 1]
    assert list(entry.objects()) == [(0, EXTENTS), (1, EXTENTS)]
    assert index.take(entry, 0) == EXTENTS
    assert index.objects == [2, 1]
    index.check()


def test_a_clear_starts_a_generation_and_hands_out_the_old_entries() -> None:
    index = index_of("ab")
    old = index.clear()
    assert sorted(names(old)) == digests("ab")
    assert all(entry.gone for entry in old)
    assert (len(index), index.objects, index.generation) == (0, [0, 0], 1)
    grow(index, "ab")
    index.check()


def test_check_notices_a_broken_tree() -> None:
    for corrupt in (_lose_parent, _lose_child, _miscount, _present_without_extents, _empty_entry):
        index = index_of("abc", "axy")
        index.check()
        corrupt(index)
        with pytest.raises(AssertionError):
            index.check()


def _lose_parent(index: Index) -> None:
    del index._entries[b"a"]


def _lose_child(index: Index) -> None:
    index._entries[b"ab"].unlink()


def _miscount(index: Index) -> None:
    index.objects[0] += 1


def _present_without_extents(index: Index) -> None:
    index._entries[b"abc"].extents[0] = Extents(b"")


def _empty_entry(index: Index) -> None:
    index.take(index._entries[b"abc"], 0)
