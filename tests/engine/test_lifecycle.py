"""However a request ends, it leaves nothing behind: no lease, no reservation, no engine block; the engine goes on.

The engines have few blocks, so requests are also preempted.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvmosaic.testing.models import prompt
from kvmosaic.testing.serving import ServerProcess
from tests.engine.processes import ROUNDING, Engine, difference, is_settled, largest_difference, running_engine

MODELS = ("gemma3", "qwen3-next")
KV_BLOCKS = {"gemma3": 90, "qwen3-next": 40}
"""Of all groups together: enough for one prompt of 1,500 tokens, not for a dozen requests at once."""
BUDGET = {"gemma3": 1000, "qwen3-next": 1024}
"""With the odd one, steps end inside blocks."""


@pytest.fixture(scope="module", params=MODELS)
def engine(
    request: pytest.FixtureRequest, server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("lifecycle")
    options = {"num_gpu_blocks_override": KV_BLOCKS[request.param], "max_num_batched_tokens": BUDGET[request.param]}
    with running_engine(request.param, folder, server.socket, **options) as engine:
        yield engine


@pytest.fixture(autouse=True)
def nothing_leaks(engine: Engine, server: ServerProcess) -> Iterator[None]:
    engine.drop_local()
    free_blocks = engine.call("state")["free_blocks"]
    assert free_blocks == KV_BLOCKS[engine.model] - 1
    yield
    engine.drain([])
    engine.drop_local()
    state = engine.call("state")
    assert state["free_blocks"] == free_blocks
    assert state["faults"] == {}
    assert is_settled(server)


def test_aborted_before_its_first_step(engine: Engine) -> None:
    names = engine.call("submit", prompts=[prompt(900, seed=100_000)])
    engine.call("abort", names=names)
    assert engine.drain(names) == [None]


@pytest.mark.parametrize("num_steps", range(1, 8))
def test_aborted_after_some_steps_of_a_cold_run(engine: Engine, num_steps: int) -> None:
    names = engine.call("submit", prompts=[prompt(1100, seed=101_000 + num_steps)], max_tokens=20)
    assert engine.call("step", count=num_steps) == 1
    engine.call("abort", names=names)
    assert engine.drain(names) == [None]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_aborted_while_its_chunks_are_loaded_and_then_asked_again(engine: Engine, num_steps: int) -> None:
    tokens = prompt(1500, seed=102_000)
    (cold,) = engine.run_cold(tokens)
    engine.run(tokens)
    engine.drop_local()
    names = engine.call("submit", prompts=[tokens], max_tokens=20)
    engine.call("step", count=num_steps)
    engine.call("abort", names=names)
    assert engine.drain(names) == [None]
    engine.drop_local()
    (warm,) = engine.run(tokens)
    assert warm.external == 1280
    assert difference(warm, cold) < ROUNDING


def test_some_of_many_waiting_requests_are_aborted(engine: Engine) -> None:
    prompts = [prompt(1000, seed=103_000 + i) for i in range(6)]
    for tokens in prompts:
        engine.run(tokens)
        engine.drop_local()
    names = engine.call("submit", prompts=[*prompts, *prompts], max_tokens=8)
    engine.call("step", count=2)
    engine.call("abort", names=names[1::2])
    answers = engine.drain(names)
    assert [answer is None for answer in answers] == [False, True] * 6


def test_preempted_requests_come_back_and_are_right(engine: Engine) -> None:
    # Each needs one more block of every group after a few decoded tokens, when all blocks are taken.
    prompts = [prompt(500, seed=104_000 + i) for i in range(12)]
    before = engine.call("state")["num_preemptions"]
    together = engine.run(*prompts, max_tokens=30)
    assert engine.call("state")["num_preemptions"] > before
    assert all(len(answer.tokens) == 30 for answer in together)
    alone = [engine.run_cold(tokens, max_tokens=30)[0] for tokens in prompts]
    assert largest_difference(alone, together) < ROUNDING
    engine.drop_local()
    warm = engine.run(*prompts, max_tokens=30)
    assert all(answer.external for answer in warm)
    assert largest_difference(alone, warm) < ROUNDING


def test_a_stop_word_ends_a_request(engine: Engine) -> None:
    tokens = prompt(600, seed=105_000)
    (free,) = engine.run(tokens, max_tokens=40)
    word = next(chr(token) for token in free.tokens if chr(token).isprintable() and token < 127)
    engine.drop_local()
    (stopped,) = engine.run(tokens, max_tokens=40, stop=word)
    assert stopped.finish == "stop"
    assert stopped.external == 512
