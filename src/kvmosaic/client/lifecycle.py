"""The life of a session as a table: state × event → state. Values only."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """Where a session is in its life."""

    ABSENT = "no server is known"
    ATTACHING = "the server knows us, the engine is not complete"
    REFUSED = "the server does not serve this engine"
    READY = "attached"
    LOST = "the server is gone, our copies are ending"
    CLOSED = "over"


class Event(Enum):
    """What moves a session on."""

    GONE = "the connection is gone, or there was none"
    WELCOMED = "the server has answered Hello"
    REFUSED = "the server does not serve this engine"
    ATTACHED = "all ranks are there"
    OUTDATED = "the epoch is over"
    ENDED = "the last copy has ended"
    CLOSED = "close() was called"


NEXT: dict[State, dict[Event, State]] = {
    State.ABSENT: {
        Event.GONE: State.ABSENT,
        Event.WELCOMED: State.ATTACHING,
        Event.REFUSED: State.REFUSED,
        Event.CLOSED: State.CLOSED,
    },
    State.ATTACHING: {
        Event.GONE: State.ABSENT,
        Event.REFUSED: State.REFUSED,
        Event.ATTACHED: State.READY,
        Event.CLOSED: State.CLOSED,
    },
    State.REFUSED: {
        Event.GONE: State.ABSENT,
        Event.WELCOMED: State.ATTACHING,
        Event.REFUSED: State.REFUSED,
        Event.ATTACHED: State.READY,
        Event.CLOSED: State.CLOSED,
    },
    State.READY: {
        Event.GONE: State.LOST,
        Event.OUTDATED: State.ATTACHING,
        Event.CLOSED: State.CLOSED,
    },
    State.LOST: {Event.ENDED: State.ABSENT, Event.CLOSED: State.CLOSED},
    State.CLOSED: {},
}
