"""Engines side by side on one server: what must be shared is, and what must not be never is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmosaic.testing.models import prompt
from kvmosaic.testing.serving import ServerProcess, wait_until
from tests.engine.processes import Engine, difference, num_ready, running_engine


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")


class TestOneModel:
    """Two engines of one Llama, both alive."""

    @pytest.fixture(scope="class")
    def first(self, server: ServerProcess, folders: tuple[Path, Path]) -> Iterator[Engine]:
        with running_engine("llama", folders[0], server.socket) as engine:
            yield engine

    @pytest.fixture(scope="class")
    def second(self, server: ServerProcess, folders: tuple[Path, Path]) -> Iterator[Engine]:
        with running_engine("llama", folders[1], server.socket) as engine:
            yield engine

    @pytest.mark.parametrize("length", [257, 1000, 2048])
    def test_what_one_engine_stored_the_other_loads(self, first: Engine, second: Engine, length: int) -> None:
        for writer, reader, seed in ((first, second, 50_000), (second, first, 60_000)):
            tokens = prompt(length, seed=seed + length)
            (cold,) = writer.run(tokens)
            (warm,) = reader.run(tokens)
            assert (cold.external, warm.external) == (0, (length - 1) // 256 * 256)
            assert difference(cold, warm) == 0.0

    def test_a_killed_engine_leaves_what_it_stored(self, server: ServerProcess, first: Engine, second: Engine) -> None:
        tokens = prompt(1000, seed=80_000)
        (cold,) = second.run(tokens)
        before = num_ready(server)
        second.kill()
        wait_until(lambda: num_ready(server) == before - 1, 5.0)
        (warm,) = first.run(tokens)
        assert warm.external == 768
        assert difference(cold, warm) == 0.0

    @pytest.mark.parametrize(
        "change",
        [{"dtype": "float32"}, {"block_size": 64}, {"hf_overrides": {"rms_norm_eps": 1e-4}}],
        ids=["dtype", "block size", "model config"],
    )
    def test_an_engine_that_differs_shares_nothing(self, first: Engine, second: Engine, change: dict[str, Any]) -> None:
        tokens = prompt(1000, seed=70_000)
        first.run(tokens)
        usual = {"dtype": "bfloat16", "block_size": None, "hf_overrides": None}
        second.restart(**{**usual, **change})
        assert second.run(tokens)[0].external == 0
        second.drop_local()
        assert second.run(tokens)[0].external == 768


class TestTwoBlockSizes:
    """Two state hybrids with N = 256 and N = 384 at once: each has the chunk that its own states need."""

    def test_each_is_served_on_its_own_boundaries(self, server: ServerProcess, folders: tuple[Path, Path]) -> None:
        tokens = prompt(1700, seed=90_000)
        with (
            running_engine("qwen3-next", folders[0], server.socket, max_num_batched_tokens=256) as narrow,
            running_engine("qwen3-next-wide", folders[1], server.socket, max_num_batched_tokens=384) as wide,
        ):
            for engine, chunk_tokens in ((narrow, 256), (wide, 384)):
                (cold,) = engine.run(tokens)
                assert cold.external == 0
                engine.drop_local()
                (warm,) = engine.run(tokens)
                assert (warm.local, warm.external) == (0, 1699 // chunk_tokens * chunk_tokens)
                assert difference(warm, cold) == 0.0
            chunks = {model["chunk_tokens"] for model in server.status()["models"]}
            assert {256, 384} <= chunks
