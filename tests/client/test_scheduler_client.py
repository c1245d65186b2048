import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvmosaic.client import SchedulerSession
from kvmosaic.client.scheduler_client import SchedulerClient
from kvmosaic.core.types import BootId, EngineKey, Outcome, ReservationId
from kvmosaic.protocol.messages import (
    Attach,
    Attached,
    Chain,
    Clear,
    Cleared,
    Commit,
    Failed,
    Hit,
    Lookup,
    Message,
    Miss,
    NotReady,
    Release,
    Reserve,
    Reserved,
)
from tests.client.peers import GEOMETRY, Listener, Peer, wait_until

DIGESTS = bytes(range(64))
CHAIN = Chain(0, b"", 32, DIGESTS, bytes(8))
BUDGET_S = 0.02


class Stage:
    """A scheduler client, attached to a server that the test plays."""

    def __init__(self, path: Path) -> None:
        self.listener = Listener(path)
        self.session = SchedulerSession(path, EngineKey("engine"))
        self.client = SchedulerClient(self.session, BUDGET_S)
        self.session.start()
        self.peer = self.listener.accept()
        self.attach("boot")

    def attach(self, boot_id: str) -> None:
        self.peer.welcome(boot_id)
        self.say_attached(boot_id, epoch=3)

    def say_attached(self, boot_id: str, epoch: int) -> None:
        attach = self.peer.take()
        assert isinstance(attach, Attach), attach
        self.peer.say(Attached(attach.id, boot_id, epoch, 4096, GEOMETRY))
        wait_until(lambda: self.session.attachment is not None)

    def answer(self, make: Callable[[int], Message]) -> "Answer":
        """Answer the next message on another thread."""
        return Answer(self.peer, make)

    def lookup(self, make: Callable[[int], Message], request: str = "r") -> object:
        with self.answer(make):
            return self.client.lookup(request, 1, 32, DIGESTS)

    def close(self) -> None:
        self.client.check()
        self.session.close()
        self.listener.close()


class Answer:
    """While entered, one message is taken, kept in `message` and answered."""

    def __init__(self, peer: Peer, make: Callable[[int], Message]) -> None:
        self.message: Message | None = None
        self._thread = threading.Thread(target=self._run, args=(peer, make))

    def _run(self, peer: Peer, make: Callable[[int], Message]) -> None:
        self.message = peer.take()
        peer.say(make(self.message.id))

    def __enter__(self) -> "Answer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path / "server.sock")
    stage.client.begin_step()
    yield stage
    stage.close()


def hit(number: int) -> Hit:
    return Hit(number, 2, 2, (1,), (bytes(16),), (bytes(4),))


def miss(number: int) -> Miss:
    return Miss(number, 1)


def test_a_lookup_carries_the_epoch_and_brings_the_answer(stage: Stage) -> None:
    with stage.answer(hit) as answer:
        assert stage.client.lookup("r", 1, 32, DIGESTS) == hit(answer.message.id if answer.message else 2)
    assert isinstance(answer.message, Lookup)
    assert answer.message == Lookup(answer.message.id, 3, "r", 1, 32, DIGESTS)
    assert stage.client.counters.hits == 1


def test_a_lease_is_released_once(stage: Stage) -> None:
    assert isinstance(stage.lookup(hit), Hit)
    stage.client.release("r")
    stage.client.release("r")
    assert stage.peer.take() == Release(0, "r")
    assert stage.peer.is_quiet()


@pytest.mark.parametrize("replies", [[], [miss], [hit, miss]], ids=["never asked", "miss", "hit, then miss"])
def test_no_lease_means_no_message(stage: Stage, replies: list[Callable[[int], Message]]) -> None:
    for reply in replies:
        stage.lookup(reply)
    stage.client.release("r")
    assert stage.peer.is_quiet()


def test_without_a_server_everything_is_a_quick_none(tmp_path: Path) -> None:
    session = SchedulerSession(tmp_path / "none", EngineKey("engine"))
    session.start()
    client = SchedulerClient(session)
    assert client.begin_step() is None
    began = time.monotonic()
    assert client.lookup("r", 0, 32, DIGESTS) is None
    assert client.reserve([CHAIN]) is None
    assert not client.clear()
    client.release("r")
    client.commit(BootId("boot"), ReservationId(1), b"\1")
    assert time.monotonic() - began < 0.1
    assert client.counters.skipped == 2
    session.close()


def test_a_lookup_past_its_deadline_releases_a_late_lease(stage: Stage) -> None:
    began = time.monotonic()
    assert stage.client.lookup("r", 1, 32, DIGESTS) is None
    assert BUDGET_S <= time.monotonic() - began < BUDGET_S + 0.005 + 0.02
    assert isinstance(stage.peer.take(), Lookup)
    assert stage.peer.take() == Release(0, "r")
    assert stage.client.counters.deadlines == 1


def test_one_step_waits_no_longer_than_its_budget_over_all_calls(stage: Stage) -> None:
    began = time.monotonic()
    for number in range(50):
        assert stage.client.lookup(str(number), 1, 32, DIGESTS) is None
    assert stage.client.reserve([CHAIN]) is None
    assert time.monotonic() - began < BUDGET_S + 0.005 + 0.02
    assert stage.client.counters.lookups == 1, "the breaker is open"
    assert stage.client.counters.skipped == 50


def test_after_a_pause_it_asks_again_and_recovers(stage: Stage) -> None:
    assert stage.client.lookup("r", 1, 32, DIGESTS) is None
    lookup = stage.peer.take()
    assert stage.peer.take() == Release(0, "r")
    stage.peer.say(hit(lookup.id))

    def hits_again() -> bool:
        stage.client.begin_step()
        return stage.client.lookup("s", 1, 32, DIGESTS) is not None

    with stage.answer(miss):
        wait_until(hits_again)
    stage.client.release("r")
    assert stage.peer.is_quiet(), "the late hit was dropped and nothing is leased"


def test_commits_and_releases_go_out_while_nothing_is_asked(stage: Stage) -> None:
    assert isinstance(stage.lookup(hit), Hit)
    assert stage.client.lookup("s", 1, 32, DIGESTS) is None
    stage.client.release("r")
    stage.client.commit(BootId("boot"), ReservationId(7), b"\1")
    taken = [stage.peer.take() for _ in range(4)]
    assert taken[2:] == [Release(0, "r"), Commit(0, 7, b"\1")]


def test_a_late_reservation_is_aborted(stage: Stage) -> None:
    assert stage.client.reserve([CHAIN]) is None
    reserve = stage.peer.take()
    assert isinstance(reserve, Reserve)
    outcomes = bytes([Outcome.GRANTED, Outcome.PRESENT, Outcome.GRANTED])
    stage.peer.say(Reserved(reserve.id, 9, outcomes, bytes(32), bytes(8)))
    assert stage.peer.take() == Commit(0, 9, bytes(2)), "by the session's thread, without another step"


def test_a_late_reservation_of_nothing_needs_no_abort(stage: Stage) -> None:
    assert stage.client.reserve([CHAIN]) is None
    stage.peer.say(Reserved(stage.peer.take().id, 0, bytes([Outcome.NO_ROOM]), b"", b""))
    stage.client.commit(BootId("boot"), ReservationId(1), b"")
    wait_until(lambda: stage.session.attachment and stage.session.attachment.connection.answered_id > 1)
    assert stage.peer.take() == Commit(0, 1, b"")
    assert stage.peer.is_quiet()


def test_reserve_and_commit(stage: Stage) -> None:
    with stage.answer(lambda number: Reserved(number, 9, b"\0\0", bytes(32), bytes(8))) as answer:
        reserved = stage.client.reserve([CHAIN])
    assert reserved is not None
    assert answer.message == Reserve(answer.message.id if answer.message else 0, 3, (CHAIN,))
    stage.client.commit(BootId("boot"), ReservationId(reserved.reservation), b"\1\0")
    assert stage.peer.take() == Commit(0, 9, b"\1\0")


@pytest.mark.parametrize("ask", ["lookup", "reserve"])
def test_not_ready_attaches_again_and_stops_this_step(stage: Stage, ask: str) -> None:
    with stage.answer(NotReady):
        if ask == "lookup":
            assert stage.client.lookup("r", 1, 32, DIGESTS) is None
        else:
            assert stage.client.reserve([CHAIN]) is None
    assert stage.client.attachment is None
    if ask == "lookup":
        assert stage.peer.take() == Release(0, "r")
    stage.say_attached("boot", epoch=4)
    attachment = stage.client.begin_step()
    assert attachment is not None
    assert attachment.epoch == 4


def test_a_failed_lookup_is_a_none_and_the_next_goes_on(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        assert stage.lookup(lambda number: Failed(number, "a bug")) is None
        assert stage.peer.take() == Release(0, "r")
    assert isinstance(stage.lookup(miss), Miss)
    assert stage.client.counters.failures == 3
    assert caplog.text.count("a bug") == 1


def test_the_attachment_of_a_step_does_not_change_within_it(stage: Stage) -> None:
    attachment = stage.client.attachment
    stage.peer.close()
    stage.peer = stage.listener.accept()
    stage.attach("boot 2")
    assert stage.client.attachment is attachment
    assert stage.client.lookup("r", 1, 32, DIGESTS) is None, "asked of the dead connection"
    assert stage.client.attachment is None
    renewed = stage.client.begin_step()
    assert renewed is not None
    assert renewed.boot_id == "boot 2"
    assert isinstance(stage.lookup(miss), Miss), "a lost connection is no reason to pause"


def test_what_belongs_to_a_dead_server_is_dropped(stage: Stage) -> None:
    assert isinstance(stage.lookup(hit), Hit)
    stage.peer.close()
    stage.peer = stage.listener.accept()
    stage.attach("boot 2")
    stage.client.release("r")
    stage.client.commit(BootId("boot"), ReservationId(1), b"\1")
    stage.client.commit(BootId("boot 2"), ReservationId(2), b"\1")
    assert stage.peer.take() == Commit(0, 2, b"\1")


def test_a_confirmed_clear_keeps_the_attachment(stage: Stage) -> None:
    with stage.answer(lambda number: Cleared(number, 5)) as answer:
        stage.client.clear()
    assert isinstance(answer.message, Clear)
    assert answer.message.weights
    assert stage.client.begin_step() is not None


def test_a_clear_without_an_answer_outdates_the_attachment(stage: Stage) -> None:
    stage.client.clear(timeout_s=0.01)
    assert stage.client.attachment is None
    assert stage.client.begin_step() is None
