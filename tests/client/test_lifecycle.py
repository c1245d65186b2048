from kvmosaic.client.lifecycle import NEXT, Event, State


def reachable(start: State) -> set[State]:
    found, todo = {start}, [start]
    while todo:
        for state in NEXT[todo.pop()].values():
            if state not in found:
                found.add(state)
                todo.append(state)
    return found


def test_every_state_has_a_row_and_every_event_a_use() -> None:
    assert set(NEXT) == set(State)
    assert {event for row in NEXT.values() for event in row} == set(Event)


def test_every_state_can_be_reached_and_only_closed_is_final() -> None:
    assert reachable(State.ABSENT) == set(State)
    for state in State:
        assert (reachable(state) == {State.CLOSED}) == (state is State.CLOSED)


def test_an_attachment_ends_its_copies_before_anything_else_begins() -> None:
    assert NEXT[State.READY][Event.GONE] is State.LOST
    assert set(NEXT[State.LOST].values()) == {State.ABSENT, State.CLOSED}
