from dataclasses import dataclass, field

from kvmosaic.core.types import BootId
from kvmosaic.engines.vllm.tracking import RequestState
from tests.engines.geometries import full_only, hybrid

LIFE = (BootId("boot"), 1)


@dataclass
class FakeRequest:
    """The few fields of the engine's request that are read; hash block 2, chunk 8."""

    num_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    lora_request: object = None
    request_id: str = "r"

    def grow(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.block_hashes.extend(b"h%d" % i for i in range(len(self.block_hashes), num_tokens // 2))


def state_of(num_tokens: int) -> RequestState:
    request = FakeRequest()
    request.grow(num_tokens)
    state = RequestState(request)
    state.adopt(LIFE, hybrid())
    return state


def test_a_chunks_digest_is_the_hash_at_its_end() -> None:
    state = state_of(17)

    assert state.hashed_chunks() == 2
    assert state.digests == [b"h3", b"h7"]
    state.request.grow(24)
    assert state.hashed_chunks() == 3
    assert state.digests == [b"h3", b"h7", b"h11"]


def test_rewritten_tokens_make_the_digests_anew() -> None:
    state = state_of(16)
    state.hashed_chunks()
    state.mark_planned(2)
    state.request.block_hashes = [b"x%d" % i for i in range(8)]

    assert state.hashed_chunks() == 2
    assert state.digests == [b"x3", b"x7"]
    assert state.planned == 0


def test_the_frontier_is_what_is_computed_confirmed_and_hashed() -> None:
    state = state_of(24)

    assert state.frontier_chunks(num_computed=24, num_drafts=0, num_unsettled=0) == 3
    assert state.frontier_chunks(num_computed=23, num_drafts=0, num_unsettled=0) == 2
    assert state.frontier_chunks(num_computed=25, num_drafts=2, num_unsettled=0) == 2
    assert state.frontier_chunks(num_computed=24, num_drafts=0, num_unsettled=1) == 2
    state.request.block_hashes = state.request.block_hashes[:8]
    assert state.frontier_chunks(num_computed=24, num_drafts=0, num_unsettled=0) == 2


def test_states_stand_where_steps_end_and_where_an_admission_starts() -> None:
    state = state_of(40)
    state.note_step(8, 19)
    state.note_step(19, 32)
    state.note_step(32, 33)

    assert state.step_ends == {8, 32}
    state.mark_planned(2)
    assert state.step_ends == {32}


def test_a_readmitted_request_forgets_its_tables() -> None:
    state = state_of(40)
    state.note_step(0, 16)
    state.mark_planned(1)
    state.readmit(0)

    assert (state.planned, state.step_ends, state.fresh) == (0, set(), True)


def test_another_life_of_the_server_starts_from_nothing() -> None:
    state = state_of(16)
    state.mark_planned(2)
    state.adopt(LIFE, hybrid())
    assert state.planned == 2
    state.adopt((BootId("other"), 1), hybrid())
    assert state.planned == 0
    state.hashed_chunks()
    state.adopt((BootId("third"), 1), full_only(16))
    assert state.digests == []


def test_a_clear_ends_the_trust_until_the_request_is_computed_anew() -> None:
    state = state_of(16)
    state.distrust()
    assert not state.trusted
    state.readmit(0)
    assert state.trusted


def test_adapters_do_not_share_digests() -> None:
    states = []
    for adapter in (b"", b"one", b"two"):
        request = FakeRequest()
        request.grow(8)
        state = RequestState(request, adapter)
        state.adopt(LIFE, hybrid())
        state.hashed_chunks()
        states.append(state)

    assert len({tuple(state.digests) for state in states}) == 3
