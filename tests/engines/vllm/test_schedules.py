"""Stories of the connector under vLLM's real Scheduler: what hits, what never leaks, what a fault costs.

The modelled worker checks every byte that a step would read, so each story is also a test of right bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvmosaic.client import Connection
from kvmosaic.engines.copying import Copier
from kvmosaic.engines.vllm import scheduler
from kvmosaic.testing.serving import ServerProcess, wait_until

pytestmark = pytest.mark.slow

Build = Callable[..., Any]
MODELS = ("full", "window", "wide window", "state")


def prompt(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(1, 250), k=num_tokens)


def chunk_tokens(model: str) -> int:
    return 32 if model == "state" else 256


def at_rest(server: ServerProcess) -> bool:
    report = server.status()
    return report["leases"] == 0 and report["reservations"] == 0


@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_is_computed_once(model: str, server: ServerProcess, engine: Build) -> None:
    first, second = engine(model), engine(model)
    tokens = prompt(1, 1000)
    step = chunk_tokens(model)

    assert first.serve("cold", tokens) == 0
    first.drop_own_cache()
    # A state model stores where steps end: the engine ends one at the last boundary before the last token.
    assert first.serve("warm", tokens) == 999 // step * step
    assert second.serve("other engine", tokens) == 999 // step * step
    assert first.runner.num_checks + second.runner.num_checks > 0
    wait_until(lambda: at_rest(server))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("length", [-1, 0, 1])
def test_one_token_is_always_left_to_compute(model: str, length: int, server: ServerProcess, engine: Build) -> None:
    one = engine(model)
    step = chunk_tokens(model)
    tokens = prompt(2, 2 * step + length)

    one.serve("cold", tokens)
    one.drop_own_cache()

    assert one.serve("warm", tokens) == (2 * step + length - 1) // step * step


@pytest.mark.parametrize("model", MODELS)
def test_decoded_tokens_hit_in_the_next_turn(model: str, server: ServerProcess, engine: Build) -> None:
    one = engine(model)
    step = chunk_tokens(model)
    tokens = prompt(3, 2 * step - 20)
    request = one.add("turn 1", tokens, max_tokens=60)
    one.run()
    next_turn = [*request.all_token_ids, *prompt(4, 30)]
    one.drop_own_cache()

    assert one.serve("turn 2", next_turn) == (len(next_turn) - 31) // step * step


@pytest.mark.parametrize("model", MODELS)
def test_the_engines_own_hit_and_ours_join(model: str, server: ServerProcess, engine: Build) -> None:
    one, other = engine(model), engine(model)
    step = chunk_tokens(model)
    tokens = prompt(5, 4 * step + 10)
    one.serve("cold", tokens)
    for own in range(1, 4):
        other.drop_own_cache()
        other.serve(f"own {own}", tokens[: own * step + 5])
        assert other.serve(f"joined {own}", tokens) > 0


def test_a_shared_prefix_of_a_state_model_hits_from_the_third_prompt_on(server: ServerProcess, engine: Build) -> None:
    one = engine("state")
    shared = prompt(6, 320)
    hits = []
    for number in range(4):
        hits.append(one.serve(f"r{number}", shared + prompt(10 + number, 100)))
        one.drop_own_cache()

    assert hits == [0, 0, 320, 320]


def test_a_shared_prefix_of_a_state_model_hits_across_engines(server: ServerProcess, engine: Build) -> None:
    engines = [engine("state") for _ in range(3)]
    shared = prompt(20, 320)

    assert [each.serve("r", shared + prompt(30 + n, 100)) for n, each in enumerate(engines)] == [0, 0, 320]


def test_a_last_boundary_has_a_state_although_vllm_forgot_its_block_size(server: ServerProcess, engine: Build) -> None:
    one = engine("state")
    one.scheduler.cache_config.block_size = 16  # half of N, as vLLM on a CPU sets it after it has planned the cache
    tokens = prompt(15, 32 * 9 + 20)
    one.serve("cold", tokens)
    one.drop_own_cache()

    assert one.serve("warm", tokens) == 32 * 9


@pytest.mark.parametrize("model", MODELS)
def test_a_tiny_pool_preempts_and_leaks_nothing(model: str, server: ServerProcess, engine: Build) -> None:
    one = engine(model, num_blocks=60 if model == "state" else 150, budget=128)
    for number in range(12):
        one.add(f"r{number}", prompt(20 + number // 3, 300), max_tokens=40)
    one.run()
    pool = one.scheduler.kv_cache_manager.block_pool

    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    wait_until(lambda: at_rest(server))


def test_a_hit_that_never_fits_the_pool_does_not_keep_a_request_waiting(server: ServerProcess, engine: Build) -> None:
    """With speculation vLLM wants more free blocks for a load than for the whole request without one."""
    one = engine("ring", spare_blocks=0, max_model_len=288, num_drafts=1)
    tokens = prompt(15, 270)
    one.serve("cold", tokens)
    one.drop_own_cache()

    one.add("warm", tokens)
    one.run(limit=100)
    wait_until(lambda: at_rest(server))


@pytest.mark.parametrize("model", MODELS)
def test_aborts_at_any_step_leak_nothing(model: str, server: ServerProcess, engine: Build) -> None:
    one = engine(model)
    tokens = prompt(7, 900)
    one.serve("cold", tokens)
    for steps in range(6):
        one.drop_own_cache()
        one.add(f"r{steps}", tokens, max_tokens=4)
        for _ in range(steps):
            one.step()
        one.abort(f"r{steps}")
        one.run()
    pool = one.scheduler.kv_cache_manager.block_pool

    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    wait_until(lambda: at_rest(server))


def test_a_restarted_server_is_used_again_and_nothing_stale_is_read(server: ServerProcess, engine: Build) -> None:
    one = engine("window")
    tokens = prompt(8, 1000)
    one.serve("cold", tokens)
    one.add("running", prompt(9, 700), max_tokens=200)
    for _ in range(5):
        one.step()
    server.restart()
    one.run()
    wait_until(lambda: server.status()["engines"] and server.status()["engines"][0]["ready"], 2.0)
    one.drop_own_cache()

    assert one.serve("lost", tokens) == 0
    one.drop_own_cache()
    assert one.serve("back", tokens) == 768


def test_a_paused_server_holds_up_no_request(server: ServerProcess, engine: Build) -> None:
    one = engine("full", connector={"kvmosaic.lookup_timeout_ms": 40})
    tokens = prompt(11, 600)
    one.serve("cold", tokens)
    one.drop_own_cache()
    server.pause()
    for number in range(50):
        one.add(f"r{number}", prompt(30 + number, 600))
    one.run()
    server.resume()

    wait_until(lambda: _serves(one, tokens), 5.0)
    wait_until(lambda: at_rest(server))


def _serves(one: Any, tokens: list[int]) -> bool:
    one.drop_own_cache()
    return one.serve(f"again {random.random()}", tokens) == 512


def test_a_clear_forgets_this_model_only(server: ServerProcess, engine: Build) -> None:
    one, other = engine("full"), engine("state")
    tokens = prompt(12, 600)
    one.serve("cold", tokens)
    other.serve("cold", tokens)
    one.drop_own_cache()
    other.drop_own_cache()

    assert one.scheduler.reset_prefix_cache(reset_connector=True)
    assert one.serve("cleared", tokens) == 0
    assert other.serve("kept", tokens) == 576


def test_an_engine_that_clears_shares_nothing_with_others_of_its_model(server: ServerProcess, engine: Build) -> None:
    one, other = engine("full"), engine("full")
    tokens = prompt(17, 600)
    one.serve("cold", tokens)
    assert one.scheduler.reset_prefix_cache(reset_connector=True)

    assert other.serve("keeps", tokens) == 512
    assert one.serve("new weights", tokens) == 0
    one.drop_own_cache()
    assert one.serve("stored anew", tokens) == 512
    server.restart()
    wait_until(lambda: sum(each["ready"] for each in server.status()["engines"]) == 2)
    one.drop_own_cache()
    one.serve("stored again", tokens)
    other.drop_own_cache()
    assert other.serve("other weights", tokens) == 0


def test_a_clear_that_the_server_does_not_confirm_still_separates(server: ServerProcess, engine: Build) -> None:
    one = engine("full")
    tokens = prompt(18, 600)
    one.serve("cold", tokens)
    server.pause()
    assert one.scheduler.reset_prefix_cache(reset_connector=True)
    one.drop_own_cache()
    assert one.serve("while paused", tokens) == 0
    server.resume()
    wait_until(lambda: one.connector._scheduler._session.attachment is not None)
    one.drop_own_cache()

    assert one.serve("new weights", tokens) == 0


def test_an_engine_without_a_server_computes(engine: Build, tmp_path: Any) -> None:
    one = engine("window")
    tokens = prompt(13, 600)

    assert one.serve("cold", tokens) == 0
    server = ServerProcess(tmp_path / "server.sock")
    try:
        wait_until(lambda: server.status()["engines"] and server.status()["engines"][0]["ready"], 2.0)
        one.drop_own_cache()
        assert one.serve("first", tokens) == 0
        one.drop_own_cache()
        assert one.serve("second", tokens) == 512
    finally:
        server.close()


@pytest.mark.parametrize("model", MODELS)
def test_the_model_sees_bytes_that_were_not_loaded(
    model: str, server: ServerProcess, engine: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of all stories above, for each object group in turn."""
    one = engine(model)
    tokens = prompt(14, 1000)
    one.serve("cold", tokens)
    load = Copier.load
    num_groups = len(server.status()["models"][0]["object_groups"])
    for group in range(num_groups):
        one.drop_own_cache()
        monkeypatch.setattr(
            Copier, "load", lambda self, plan, stop, skip=group: plan.object_group == skip or load(self, plan, stop)
        )
        with pytest.raises(AssertionError, match="wrong bytes"):
            one.serve(f"warm {group}", tokens)
        monkeypatch.undo()
        one.abort(f"warm {group}")
        one.run()


def test_what_one_step_may_not_ask_for_is_asked_for_in_the_next(
    server: ServerProcess, engine: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MAX_OBJECTS_PER_STEP", 1)
    one = engine("full", budget=1024)
    tokens = prompt(19, 1000)
    one.serve("cold", tokens, max_tokens=4)
    one.drop_own_cache()

    assert one.serve("warm", tokens) == 768


def test_a_step_without_stores_or_loads_sends_nothing(
    server: ServerProcess, engine: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine("window")
    sent = []
    send = Connection._send
    monkeypatch.setattr(Connection, "_send", lambda self, frame: (sent.append(len(frame)), send(self, frame))[1])
    one.add("r", prompt(16, 300), max_tokens=150)
    for _ in range(3):
        one.step()
    assert sent, "the store of the prompt was sent"
    sent.clear()
    for _ in range(100):
        one.step()

    assert not sent
