"""A state hybrid at every token budget: kvmosaic needs no particular one, it asks for a state where prompts part.

Qwen3-Next with N = 256. The junction: prompts that share a prefix and then differ, the engine's cache dropped between
them. The first two compute; the second is asked to end a step where it leaves the first; the third is served.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvmosaic.testing.models import prompt
from kvmosaic.testing.serving import ServerProcess
from tests.engine.processes import ROUNDING, Engine, difference, is_settled, running_engine

N = 256
SHARED = 1536
BUDGETS = (N // 2, N, 2 * N - 1, 8 * N)


@pytest.fixture(scope="module", params=BUDGETS)
def engine(
    request: pytest.FixtureRequest, server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("budget")
    with running_engine("qwen3-next", folder, server.socket, max_num_batched_tokens=request.param) as engine:
        yield engine
        assert engine.call("state")["faults"] == {}
    assert is_settled(server)


def budget(engine: Engine) -> int:
    tokens: int = engine.call("state")["budget_tokens"]
    return tokens


def branches(series: int, count: int = 4) -> list[list[int]]:
    """Prompts of one shared prefix with tails longer than N, so that no prompt ends a step at the junction."""
    shared = prompt(SHARED, seed=series)
    return [[*shared, *prompt(300 + 130 * number, seed=series + 1 + number)] for number in range(count)]


@pytest.mark.parametrize("length", [N - 1, N, N + 1, 2 * N, 1000, 1800, 2304, 3000])
def test_a_known_prompt_is_served_to_the_last_boundary_with_a_state(engine: Engine, length: int) -> None:
    tokens = prompt(length, seed=7_000_000 + 10_000 * budget(engine) + length)
    (cold,) = engine.run(tokens)
    assert cold.external == 0
    engine.drop_local()
    (warm,) = engine.run(tokens)
    assert (warm.local, warm.external) == (0, (length - 1) // N * N)
    assert difference(warm, cold) == 0.0


def test_from_the_third_prompt_on_the_whole_shared_prefix_is_served(engine: Engine) -> None:
    prompts = branches(series=1000 * budget(engine))
    cold = [engine.run_cold(tokens)[0] for tokens in prompts]
    served = []
    for tokens, reference in zip(prompts, cold, strict=True):
        engine.drop_local()
        (answer,) = engine.run(tokens)
        served.append(answer.external)
        if answer.external:
            assert difference(answer, reference) < ROUNDING
    # Where the budget is N or less the first prompt already leaves a state on every boundary.
    computed = 1 if budget(engine) < 2 * N else 2
    assert served == [0] * computed + [SHARED] * (4 - computed)


def test_after_a_restart_the_junction_is_still_served(engine: Engine) -> None:
    prompts = branches(series=1000 * budget(engine) + 500)
    for tokens in prompts[:2]:
        engine.drop_local()
        engine.run(tokens)
    engine.restart()
    for tokens in prompts[2:]:
        engine.drop_local()
        (cold,) = engine.run_cold(tokens)
        (warm,) = engine.run(tokens)
        assert (warm.local, warm.external) == (0, SHARED)
        assert difference(warm, cold) < ROUNDING
