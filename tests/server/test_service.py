import struct
from contextlib import suppress

import pytest

from kvmosaic.core.types import Outcome, unpack_extents
from kvmosaic.errors import RemoteProtocolError
from kvmosaic.layout.groups import Declaration
from kvmosaic.protocol.messages import (
    PROTOCOL,
    Attach,
    Attached,
    Attaching,
    Chain,
    Clear,
    Cleared,
    Commit,
    Declare,
    Detach,
    Failed,
    Hello,
    Hit,
    Lookup,
    Mapped,
    Miss,
    NotReady,
    Refusal,
    Release,
    Request,
    Reserve,
    Reserved,
    Status,
    StatusReport,
    Welcome,
)
from kvmosaic.server.engines import Session
from kvmosaic.server.peers import Process
from kvmosaic.server.report import Report
from kvmosaic.server.service import Service
from tests.server.kit import (
    BOOT_ID,
    MIB,
    Client,
    MortalProcess,
    declaration,
    make_service,
    mapped_worker,
    scheduler,
    worker,
)


def digests(num_chunks: int, salt: int = 0) -> bytes:
    return b"".join(struct.pack("<QQ", salt, chunk) for chunk in range(num_chunks))


def lookup(epoch: int, num_chunks: int, request: str = "r", salt: int = 0) -> Lookup:
    return Lookup(3, epoch, request, 0, 16, digests(num_chunks, salt))


def reserve(epoch: int, num_chunks: int, salt: int = 0) -> Reserve:
    wanted = struct.pack("<I", 1) * num_chunks
    return Reserve(4, epoch, (Chain(0, b"", 16, digests(num_chunks, salt), wanted),))


def store(client: Client, epoch: int, num_chunks: int, salt: int = 0) -> None:
    reserved = client.ask(reserve(epoch, num_chunks, salt))
    assert isinstance(reserved, Reserved)
    client.post(Commit(0, reserved.reservation, b"\1" * num_chunks))


def report(service: Service) -> Report:
    operator = Client(service)
    operator.hello("operator", "")
    reply = operator.ask(Status(9))
    assert isinstance(reply, StatusReport)
    return reply.report


# Introduction.


def test_a_session_is_welcomed_with_the_boot_id() -> None:
    assert Client(make_service()).hello("operator", "") == Welcome(1, BOOT_ID)


def test_another_protocol_is_refused_with_both_numbers() -> None:
    with pytest.raises(RemoteProtocolError, match=f"{PROTOCOL + 1} and this server {PROTOCOL}"):
        Client(make_service()).ask(Hello(1, PROTOCOL + 1, "worker", "e"))


def test_nothing_is_answered_before_hello() -> None:
    with pytest.raises(RemoteProtocolError, match="Status came before Hello"):
        Client(make_service()).ask(Status(1))


def test_hello_is_said_once() -> None:
    client = scheduler(make_service())
    with pytest.raises(RemoteProtocolError, match="once"):
        client.hello("scheduler")


def test_a_half_of_an_engine_must_name_it() -> None:
    with pytest.raises(RemoteProtocolError, match="must name its engine"):
        Client(make_service()).hello("worker", "")


@pytest.mark.parametrize(
    ("role", "request_"),
    [
        ("worker", Lookup(1, 1, "r", 0, 16, b"")),
        ("worker", Clear(1)),
        ("scheduler", Declare(1, declaration())),
        ("operator", Attach(1)),
        ("operator", Reserve(1, 1, ())),
    ],
)
def test_each_role_says_only_what_is_its_own(role: str, request_: Request) -> None:
    client = Client(make_service())
    client.hello(role)  # type: ignore[arg-type]  # a parameter is a plain string
    with pytest.raises(RemoteProtocolError, match=f"a {role} may not send"):
        client.ask(request_)


def test_a_one_way_message_that_waits_for_a_reply_breaks_the_protocol() -> None:
    client = scheduler(make_service())
    with pytest.raises(RemoteProtocolError, match="one-way"):
        client.ask(Release(5, "r"))


# Registration.


def test_an_engine_is_ready_when_all_ranks_have_declared_and_mapped_the_arena() -> None:
    service = make_service()
    asks = scheduler(service)
    assert asks.ask(Attach(2)) == Attaching(2, (), 0)

    first = worker(service, declaration(0, 2))
    assert first.ask(Attach(2)) == Attaching(2, (0,), 2)
    second = worker(service, declaration(1, 2))
    assert asks.ask(Attach(2)) == Attaching(2, (), 2)

    for client in (first, second):
        attached = client.attach()
        assert attached.arena_bytes == 64 * MIB
        client.post(Mapped(0, attached.epoch))
        if client is first:
            assert asks.ask(Attach(2)) == Attaching(2, (0,), 2)
    assert asks.attach().geometry.chunk_tokens == 256
    assert asks.attach().geometry.object_groups[0].object_bytes == 2 * MIB


def test_a_rank_that_declares_again_starts_a_new_epoch() -> None:
    service = make_service()
    process = MortalProcess()
    mapped_worker(service, process=process)
    asks = scheduler(service)
    old = asks.attach().epoch

    again = worker(service, declaration(), process=process)
    assert asks.ask(lookup(old, 1)) == NotReady(3)
    assert asks.ask(Attach(2)) == Attaching(2, (), 1)
    new = again.attach().epoch
    assert new > old
    again.post(Mapped(0, new))
    assert asks.ask(lookup(old, 1)) == NotReady(3), "a plan of the old epoch may still be under way"
    assert asks.attach().epoch == new
    assert asks.ask(lookup(new, 1)) == Miss(3, 0)


def test_a_mapping_of_an_earlier_declaration_counts_for_nothing() -> None:
    service = make_service()
    process = MortalProcess()
    old = mapped_worker(service, process=process).attach().epoch
    again = worker(service, declaration(), process=process)
    again.attach()
    again.post(Mapped(0, old))
    assert scheduler(service).ask(Attach(2)) == Attaching(2, (), 1)


def test_a_worker_whose_session_is_lost_makes_the_engine_not_ready() -> None:
    service = make_service()
    client = mapped_worker(service)
    asks = scheduler(service)
    epoch = asks.attach().epoch
    client.leave()
    assert asks.ask(lookup(epoch, 1)) == NotReady(3)
    assert asks.ask(reserve(epoch, 1)) == NotReady(4)


def test_an_unusable_chunk_size_is_refused_on_both_sides_with_the_same_words() -> None:
    service = make_service(chunk_tokens=256)
    client = Client(service)
    client.hello("worker")
    refusal = client.ask(Declare(2, declaration(block_tokens=784)))
    assert isinstance(refusal, Refusal)
    for word in ("256", "784", "--chunk-size"):
        assert word in refusal.reason
    assert client.ask(Attach(2)) == Refusal(2, refusal.reason)
    assert scheduler(service).ask(Attach(2)) == Refusal(2, refusal.reason)


def test_a_refusal_is_logged_once_however_often_the_worker_asks(caplog: pytest.LogCaptureFixture) -> None:
    client = Client(make_service(chunk_tokens=256))
    client.hello("worker")
    for _ in range(3):
        client.ask(Declare(2, declaration(block_tokens=784)))
    assert caplog.text.count("784") > 0
    assert len(caplog.records) == 1


def test_the_same_rank_of_two_live_processes_is_refused_with_both_pids() -> None:
    service = make_service()
    owner = mapped_worker(service)
    intruder = Client(service)
    intruder.hello("worker")
    refusal = intruder.ask(Declare(2, declaration()))
    assert isinstance(refusal, Refusal)
    assert f"pid {owner.process.pid}" in refusal.reason
    assert f"pid {intruder.process.pid}" in refusal.reason
    assert isinstance(owner.ask(Attach(2)), Attached), "the owner is not disturbed"


def test_a_rank_of_a_dead_process_is_taken_over_at_once() -> None:
    service = make_service()
    owner = mapped_worker(service)
    owner.process.die()  # type: ignore[attr-defined]  # a MortalProcess
    assert isinstance(worker(service, declaration()).ask(Attach(2)), Attached)


def test_ranks_that_disagree_are_refused_with_both_values() -> None:
    service = make_service()
    worker(service, declaration(0, 2))
    client = worker(service, declaration(1, 2, block_tokens=32))
    refusal = client.ask(Attach(2))
    assert isinstance(refusal, Refusal)


@pytest.mark.parametrize(("rank", "world"), [(1, 1), (-1, 1), (0, 0)])
def test_a_rank_outside_its_world_is_refused(rank: int, world: int) -> None:
    client = Client(make_service())
    client.hello("worker")
    assert isinstance(client.ask(Declare(2, declaration(rank, world))), Refusal)


def test_a_process_whose_death_cannot_be_proven_may_not_map_the_arena() -> None:
    service = make_service()
    client = Client(service, Process(1, 0, None))
    client.hello("worker")
    refusal = client.ask(Declare(2, declaration()))
    assert isinstance(refusal, Refusal)
    assert "pidfd" in refusal.reason
    assert not isinstance(client.ask(Attach(2)), Attached)


@pytest.mark.parametrize("attached", [True, False])
def test_a_layout_may_change_only_while_no_other_rank_is_attached_to_the_old_one(attached: bool) -> None:
    service = make_service()
    first = worker(service, declaration(0, 2))
    second = worker(service, declaration(1, 2))
    if attached:
        first.attach()
    changed = second.ask(Declare(2, declaration(1, 2, pages="other pages")))
    if attached:
        assert isinstance(changed, Refusal)
        assert "rank 0 is attached to the old one" in changed.reason
    else:
        assert isinstance(second.ask(Attach(2)), Attached)


def test_two_schedulers_of_one_engine_are_not_let_in() -> None:
    service = make_service()
    first = scheduler(service)
    refused = Client(service).hello("scheduler")
    assert isinstance(refused, Failed)
    assert f"pid {first.process.pid}" in refused.reason
    assert isinstance(Client(service, first.process).hello("scheduler"), Welcome), "it reconnects"


# Storing and loading.


def test_what_was_committed_is_found_and_leased() -> None:
    service = make_service()
    mapped_worker(service)
    asks = scheduler(service)
    epoch = asks.attach().epoch
    reserved = asks.ask(reserve(epoch, 3))
    assert isinstance(reserved, Reserved)
    assert reserved.outcomes == bytes([Outcome.GRANTED]) * 3
    assert asks.ask(lookup(epoch, 3)) == Miss(3, 0), "nothing is visible before the commit"

    asks.post(Commit(0, reserved.reservation, b"\1\1\1"))
    hit = asks.ask(lookup(epoch, 3))
    assert isinstance(hit, Hit)
    assert hit.boundary == 3
    assert hit.extents[0] == reserved.extents
    assert sum(length for _, length in unpack_extents(hit.extents[0])) == 3 * MIB
    assert report(service)["leases"] == 1
    asks.post(Release(0, "r"))
    assert report(service)["leases"] == 0


@pytest.mark.parametrize(
    "broken",
    [
        Lookup(3, 1, "r", 0, 0, b""),
        Lookup(3, 1, "r", 0, 16, b"too short"),
        Lookup(3, 1, "r", -1, 16, b""),
        Reserve(4, 1, (Chain(0, b"", 16, digests(2), b"\1\0\0\0"),)),
        Reserve(4, 1, (Chain(0, b"", 16, digests(1), b"\1\0\0"),)),
        Reserve(4, 1, (Chain(0, b"", 16, digests(1), b"\2\0\0\0"),)),
        Reserve(4, 1, (Chain(0, digests(1), 16, digests(1), b"\1\0\0\0"),)),
        Reserve(4, 1, (Chain(1, b"", 16, digests(1), b"\1\0\0\0"),)),
    ],
)
def test_arrays_that_do_not_fit_together_break_the_protocol(broken: Lookup | Reserve) -> None:
    service = make_service()
    mapped_worker(service)
    asks = scheduler(service)
    assert asks.attach().epoch == 1
    with pytest.raises(RemoteProtocolError):
        asks.ask(broken)
    service.check()


def test_a_commit_of_nothing_known_is_only_counted() -> None:
    service = make_service()
    mapped_worker(service)
    asks = scheduler(service)
    asks.attach()
    asks.post(Commit(0, 12345, b"\1"))
    assert report(service)["counters"]["unknown_commits"] == 1


# Holds and death.


def held(service: Service) -> tuple[int, int]:
    numbers = report(service)
    return numbers["leases"], numbers["reservations"]


def test_the_end_of_sessions_frees_nothing_and_the_last_death_everything() -> None:
    service = make_service()
    copies = mapped_worker(service)
    asks = scheduler(service)
    epoch = asks.attach().epoch
    store(asks, epoch, 2)
    asks.ask(lookup(epoch, 2))
    asks.ask(reserve(epoch, 5))
    assert held(service) == (1, 1)

    asks.leave()
    copies.leave()
    service.died(asks.process)
    assert held(service) == (1, 1), "the worker may still read and write"
    assert report(service)["quarantined"] == 1

    service.died(copies.process)
    assert held(service) == (0, 0)
    assert report(service)["quarantined"] == 0
    assert report(service)["engines"] == []


def test_a_worker_that_detaches_is_as_good_as_dead() -> None:
    service = make_service()
    copies = mapped_worker(service)
    asks = scheduler(service)
    asks.ask(reserve(asks.attach().epoch, 2))
    asks.leave()
    assert held(service) == (0, 1)
    copies.post(Detach(0))
    assert held(service) == (0, 0)


def test_a_worker_that_declares_again_has_no_copy_in_flight() -> None:
    service = make_service()
    copies = mapped_worker(service)
    asks = scheduler(service)
    asks.ask(reserve(asks.attach().epoch, 2))
    asks.leave()
    copies.leave()
    assert held(service) == (0, 1)
    worker(service, declaration(), process=copies.process)
    assert held(service) == (0, 0)


def test_a_scheduler_that_reconnects_keeps_what_its_engine_holds() -> None:
    service = make_service()
    mapped_worker(service)
    asks = scheduler(service)
    epoch = asks.attach().epoch
    reserved = asks.ask(reserve(epoch, 2))
    assert isinstance(reserved, Reserved)
    asks.leave()
    again = scheduler(service, process=asks.process)
    assert again.attach().epoch == epoch, "no rank has declared since"
    again.post(Commit(0, reserved.reservation, b"\1\1"))
    assert isinstance(again.ask(lookup(epoch, 2)), Hit)


def test_one_dead_rank_of_two_frees_nothing() -> None:
    service = make_service()
    ranks = [worker(service, declaration(rank, 2)) for rank in range(2)]
    for client in ranks:
        client.post(Mapped(0, client.attach().epoch))
    asks = scheduler(service)
    asks.ask(reserve(asks.attach().epoch, 2))
    asks.leave()
    service.died(ranks[0].process)
    assert held(service) == (0, 1)
    service.died(ranks[1].process)
    assert held(service) == (0, 0)


def test_two_ranks_in_one_process_speak_for_themselves() -> None:
    service = make_service()
    process = MortalProcess()
    ranks = [worker(service, declaration(rank, 2), process=process) for rank in range(2)]
    for client in ranks:
        client.post(Mapped(0, client.attach().epoch))
    asks = scheduler(service)
    asks.ask(reserve(asks.attach().epoch, 2))
    asks.leave()
    ranks[0].post(Detach(0))
    assert held(service) == (0, 1), "the other rank may have a copy in flight"
    ranks[1].post(Detach(0))
    assert held(service) == (0, 0)


def test_a_lost_session_says_nothing_about_the_one_that_replaced_it() -> None:
    service = make_service()
    process = MortalProcess()
    old = mapped_worker(service, process=process)
    new = mapped_worker(service, process=process)
    old.post(Detach(0))
    old.leave()
    assert scheduler(service).attach().epoch == new.attach().epoch


def test_engines_do_not_disturb_each_other() -> None:
    service = make_service()
    for engine, block_tokens in (("a", 16), ("b", 544), ("c", 784)):
        mapped_worker(service, declaration(model=engine, block_tokens=block_tokens), engine)
    chunk_tokens = [scheduler(service, engine).attach().geometry.chunk_tokens for engine in "abc"]
    assert chunk_tokens == [256, 544, 784]
    assert len(report(service)["models"]) == 3


# Operators.


def engine_with_objects(service: Service, name: str, num_chunks: int, key: str = "") -> Client:
    mapped_worker(service, declaration(model=name), key or name)
    asks = scheduler(service, key or name)
    store(asks, asks.attach().epoch, num_chunks)
    return asks


def operator(service: Service) -> Client:
    client = Client(service)
    client.hello("operator", "")
    return client


def test_clear_forgets_one_model_or_all() -> None:
    service = make_service()
    engine_with_objects(service, "a", 2)
    engine_with_objects(service, "b", 3)
    unknown = operator(service).ask(Clear(1, "c"))
    assert isinstance(unknown, Failed)
    assert "a, b" in unknown.reason
    assert operator(service).ask(Clear(1, "a")) == Cleared(1, 2)
    assert report(service)["objects"] == 3
    assert operator(service).ask(Clear(1)) == Cleared(1, 3)
    assert report(service)["used_bytes"] == 0


def test_an_engine_clears_only_its_own() -> None:
    service = make_service()
    asks = engine_with_objects(service, "a", 2)
    engine_with_objects(service, "b", 3)
    assert asks.ask(Clear(1, weights="w")) == Cleared(1, 2)
    assert {model["model"]: model["objects"] for model in report(service)["models"]} == {"a": 0, "b": 3}


def test_an_engine_that_clears_leaves_what_others_of_its_model_use() -> None:
    service = make_service()
    leaves = engine_with_objects(service, "a", 2)
    stays = engine_with_objects(service, "a", 2, key="other")
    assert leaves.ask(Clear(1, weights="w")) == Cleared(1, 0)
    assert isinstance(stays.ask(lookup(stays.attach().epoch, 2)), Hit)
    assert isinstance(leaves.ask(lookup(leaves.attach("w").epoch, 2)), Miss)
    assert stays.ask(Clear(1, weights="v")) == Cleared(1, 2)


def test_a_clear_of_an_engine_names_its_weights() -> None:
    with pytest.raises(RemoteProtocolError, match="weights"):
        engine_with_objects(make_service(), "a", 2).ask(Clear(1))


def test_an_engine_that_is_not_complete_is_told_that_nothing_was_cleared() -> None:
    assert scheduler(make_service()).ask(Clear(1, weights="w")) == NotReady(1)


def test_the_report_says_what_is_held() -> None:
    service = make_service()
    asks = engine_with_objects(service, "a", 2)
    asks.ask(lookup(asks.attach().epoch, 2))
    numbers = report(service)
    expected = {"objects": 2, "object_bytes": 2 * MIB, "capacity_bytes": 64 * MIB, "usable_bytes": 64 * MIB}
    assert expected.items() <= numbers.items()
    assert (numbers["leases"], numbers["reservations"], numbers["sessions"]) == (1, 0, 2)
    (engine,) = numbers["engines"]
    assert engine["ready"]
    assert engine["ranks"] == engine["world"] == 1
    (model,) = numbers["models"]
    assert (model["lookups"], model["hits"], model["hit_chunks"], model["objects"]) == (1, 1, 2, 2)
    assert model["object_groups"][0]["kind"] == "full"


def test_a_malformed_declaration_does_not_disturb_others() -> None:
    """Whatever it raises, the loop turns into a reply; here only the books must stay right."""
    service = make_service()
    good = engine_with_objects(service, "good", 2)
    for groups, shards in (((), ()), (declaration().groups, ()), (declaration().groups * 3, declaration().shards)):
        broken = Declaration(0, 1, "m", groups, shards, {}, "", 0, 0)
        client = Client(service)
        client.hello("worker", "broken")
        with suppress(Exception):
            service.handle(client.session, Declare(1, broken))
        client.leave()
        service.check()
    assert isinstance(good.ask(lookup(good.attach().epoch, 2)), Hit)


def test_sessions_that_never_spoke_may_leave() -> None:
    service = make_service()
    service.lost(Session(MortalProcess()))
    assert len(service.engines) == 0
