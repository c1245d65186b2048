"""What comes from kvmosaic gives the very log-probabilities that computing it gives, for every kind of attention.

The token budget is one chunk, so a step of a cold run ends on every boundary: the last step of a warm run is cut as
in the cold run, and the two must be equal to the bit. Batches mix steps; there the engine's own spread is the
tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmosaic.testing.models import prompt
from kvmosaic.testing.serving import ServerProcess
from tests.engine.processes import (
    ROUNDING,
    VISIBLE,
    Answer,
    Engine,
    difference,
    is_settled,
    largest_difference,
    running_engine,
)

CHUNK = 256
MODELS = ("llama", "gemma3", "gpt-oss", "qwen3-next")
LENGTHS = (
    *(CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1),
    *(300, 641, 777, 900, 1111, 1500, 2048, 2700),
)
SPLITS = (128, 256, 300, 384, 512, 640, 896, 1024, 1279)
NUM_GROUPS = {"llama": 1, "gemma3": 4, "gpt-oss": 2, "qwen3-next": 4}
"""How many groups vLLM makes of each model, each of which a negative control spoils."""


@pytest.fixture(scope="module", params=MODELS)
def engine(
    request: pytest.FixtureRequest, server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    with running_engine(request.param, folder, server.socket, max_num_batched_tokens=CHUNK) as engine:
        yield engine
        assert engine.call("state")["faults"] == {}
    assert is_settled(server)


@pytest.fixture(scope="module")
def stored(engine: Engine) -> dict[int, Answer]:
    """Cold answers to one prompt of each length, whose chunks the server now holds. The prompts share nothing."""
    return {length: engine.run(prompt(length, seed=length))[0] for length in LENGTHS}


def promised(num_tokens: int) -> int:
    """The fold rule, where every boundary is there: the last one that leaves a token to compute."""
    return (num_tokens - 1) // CHUNK * CHUNK


def test_the_engine_plans_the_groups_and_the_budget_that_these_tests_rely_on(engine: Engine) -> None:
    state = engine.call("state")
    assert len(state["groups"]) == NUM_GROUPS[engine.model]
    assert state["budget_tokens"] == CHUNK
    assert CHUNK % max(state["block_tokens"]) == 0


def test_a_prompt_never_seen_is_computed_though_other_models_know_it(stored: dict[int, Answer]) -> None:
    assert all(answer.local == answer.external == 0 for answer in stored.values())


@pytest.mark.parametrize("length", LENGTHS)
def test_a_known_prompt_is_served_to_the_last_boundary_and_bit_equal(
    engine: Engine, stored: dict[int, Answer], length: int
) -> None:
    engine.drop_local()
    (warm,) = engine.run(prompt(length, seed=length))
    assert (warm.local, warm.external) == (0, promised(length))
    assert difference(warm, stored[length]) == 0.0


def test_a_shared_prefix_is_served_under_every_tail(engine: Engine) -> None:
    head = prompt(1024, seed=1)
    prompts = [head + prompt(length, seed=length) for length in (1, 2, 100, 255, 256, 257, 700)]
    cold = [engine.run_cold(tokens)[0] for tokens in prompts]
    engine.run(head + prompt(300, seed=2))
    for tokens, reference in zip(prompts, cold, strict=True):
        engine.drop_local()
        (warm,) = engine.run(tokens)
        assert (warm.local, warm.external) == (0, 1024)
        assert difference(warm, reference) == 0.0


@pytest.mark.parametrize("split", SPLITS)
def test_the_engines_own_hit_and_ours_add_up(engine: Engine, split: int) -> None:
    tokens = prompt(1400, seed=3)
    (cold,) = engine.run_cold(tokens)
    engine.run(tokens)
    engine.drop_local()
    engine.run([*tokens[:split], 7], max_tokens=1)
    (warm,) = engine.run(tokens)
    assert warm.local + warm.external == promised(1400)
    assert warm.local <= split
    if split >= CHUNK:
        assert warm.local >= split // CHUNK * CHUNK
    assert difference(warm, cold) == 0.0


def test_a_dozen_at_once_are_right(engine: Engine) -> None:
    heads = [prompt(600, seed=10), prompt(1100, seed=11)]
    prompts = [[*heads[i % 2], *prompt(60 + 37 * i, seed=20 + i)] for i in range(12)]
    alone = [engine.run_cold(tokens)[0] for tokens in prompts]
    together = engine.run_cold(*prompts)
    assert largest_difference(alone, together) < ROUNDING
    engine.run_apart(*prompts)
    engine.drop_local()
    warm = engine.run(*prompts)
    assert [answer.local + answer.external for answer in warm] == [promised(len(tokens)) for tokens in prompts]
    assert largest_difference(warm, alone) < ROUNDING


def test_the_next_turn_of_a_chat_finds_the_tokens_that_were_decoded(engine: Engine) -> None:
    question = prompt(700, seed=30)
    (turn,) = engine.run(question, max_tokens=120)
    follow_up = [*question, *turn.tokens, *prompt(50, seed=31)]
    assert promised(len(question)) < promised(len(follow_up)) < len(question) + len(turn.tokens)
    (local,) = engine.run(follow_up)
    engine.drop_local()
    (warm,) = engine.run(follow_up)
    assert (warm.local, warm.external) == (0, promised(len(follow_up)))
    assert difference(warm, local) == 0.0
    (cold,) = engine.run_cold(follow_up)
    assert difference(warm, cold) < ROUNDING


def test_another_cache_salt_is_another_prompt(engine: Engine) -> None:
    tokens = prompt(800, seed=40)
    engine.run(tokens, salts=["one"])
    engine.drop_local()
    assert engine.run(tokens, salts=["two"])[0].external == 0
    engine.drop_local()
    assert engine.run(tokens, salts=["one"])[0].external == promised(800)


@pytest.fixture(scope="module")
def restarted(engine: Engine, stored: dict[int, Answer]) -> Engine:
    """The same engine after a restart: its own cache is empty. Tests below this line run on it."""
    assert stored
    engine.restart()
    return engine


def test_an_engine_that_starts_anew_hits_what_the_last_one_stored(restarted: Engine, stored: dict[int, Answer]) -> None:
    for length, cold in stored.items():
        (warm,) = restarted.run(prompt(length, seed=length))
        assert (warm.local, warm.external) == (0, promised(length))
        assert difference(warm, cold) == 0.0


def test_zeroing_what_any_one_group_loads_is_visible(restarted: Engine, stored: dict[int, Answer]) -> None:
    length = 1500
    for group in range(NUM_GROUPS[restarted.model]):
        restarted.drop_local()
        restarted.call("spoil", group=group)
        (spoilt,) = restarted.run(prompt(length, seed=length))
        assert restarted.call("spoil", group=None) > 0
        assert spoilt.external == promised(length)
        assert difference(spoilt, stored[length]) > VISIBLE, f"group {group}"
    restarted.drop_local()
    (warm,) = restarted.run(prompt(length, seed=length))
    assert difference(warm, stored[length]) == 0.0


def test_clearing_our_cache_through_the_engine_empties_this_model_only(
    restarted: Engine, server: ServerProcess
) -> None:
    def objects() -> dict[str, int]:
        return {model["namespace"]: model["objects"] for model in server.status()["models"]}

    before = objects()
    assert restarted.call("clear_external") is True
    after = objects()
    emptied = [namespace for namespace, count in before.items() if count and not after.get(namespace)]
    assert len(emptied) == 1
    assert all(after[namespace] == count for namespace, count in before.items() if namespace not in emptied)
    assert not any(count for namespace, count in after.items() if namespace not in before)
    assert restarted.run(prompt(1500, seed=1500))[0].external == 0
    restarted.drop_local()
    assert restarted.run(prompt(1500, seed=1500))[0].external == promised(1500)
