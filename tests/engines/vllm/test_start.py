"""What happens when an engine starts: refusals that reach the user, object group modes, waiting, autostart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvmosaic.client import Connection
from kvmosaic.engines.vllm import start
from kvmosaic.errors import Refused, ServerLost, SettingsError
from kvmosaic.testing.serving import ServerProcess, wait_until
from tests.engines.vllm.test_schedules import prompt

pytestmark = pytest.mark.slow

Build = Callable[..., Any]


@pytest.fixture
def serve(tmp_path: Path):
    servers: list[ServerProcess] = []

    def build(*flags: str) -> ServerProcess:
        servers.append(ServerProcess(tmp_path / "server.sock", 0.0625, *flags))
        return servers[-1]

    yield build
    for server in servers:
        server.close()


def test_a_chunk_size_inside_a_block_is_refused_with_the_fix(
    serve: Callable[..., ServerProcess], engine: Build
) -> None:
    server = serve("--chunk-size", "100")
    with pytest.raises(Refused, match=r"100.*multiple.*32.*96.*128"):
        engine("state")
    assert "100" in server.log()


def test_a_larger_multiple_works_with_a_warning(serve: Callable[..., ServerProcess], engine: Build) -> None:
    serve("--chunk-size", "96")
    one = engine("state")
    tokens = prompt(1, 500)
    one.serve("cold", tokens)
    one.drop_own_cache()

    # Steps end on multiples of N; the last one before the prompt's end, 480, is a boundary only if C divides it.
    assert one.serve("warm", tokens) == 480


def test_merged_object_groups_need_a_budget_of_one_block_a_step(
    serve: Callable[..., ServerProcess], engine: Build
) -> None:
    serve("--no-separate-object-groups")
    with pytest.raises(Refused, match=r"max_num_batched_tokens.*512.*32"):
        engine("state", budget=512)
    one = engine("state", budget=32)
    tokens = prompt(2, 300)
    one.serve("cold", tokens)
    one.drop_own_cache()

    assert one.serve("warm", tokens) == 288


@pytest.mark.parametrize("model", ["full", "window", "wide window"])
def test_merged_object_groups_serve_other_models_alike(
    model: str, serve: Callable[..., ServerProcess], engine: Build
) -> None:
    server = serve("--no-separate-object-groups")
    one = engine(model)
    tokens = prompt(3, 1000)
    one.serve("cold", tokens)
    one.drop_own_cache()

    assert one.serve("warm", tokens) == 768
    assert len(server.status()["models"][0]["object_groups"]) == 1


def test_a_required_server_that_is_absent_stops_the_start(engine: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "REQUIRED_S", 0.3)
    with pytest.raises(Refused, match=r"kvmosaic\.required.*kvmosaic server --l1-size-gb"):
        engine("full", connector={"kvmosaic.required": True})


def test_a_typing_error_stops_the_start(engine: Build) -> None:
    with pytest.raises(SettingsError, match=r"kvmosaic\.sokcet"):
        engine("full", connector={"kvmosaic.sokcet": "x"})


def test_an_engine_can_bring_its_own_server(engine: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "LINGER_S", 1)
    one = engine("full", connector={"kvmosaic.autostart": 0.0625})
    other = engine("full", connector={"kvmosaic.autostart": 0.0625})
    tokens = prompt(4, 1000)
    wait_until(lambda: one.scheduler.connector._scheduler._client.begin_step() is not None)
    one.serve("cold", tokens)

    assert other.serve("warm", tokens) == 768
    one.close()
    other.close()
    wait_until(lambda: not listens(tmp_path / "server.sock"), 15)


def listens(path: Path) -> bool:
    try:
        Connection.connect(path).close()
    except ServerLost:
        return False
    return True


def test_a_failed_load_is_recomputed_unless_the_user_wants_the_request_to_fail(
    serve: Callable[..., ServerProcess], engine: Build
) -> None:
    serve()
    failing = engine("full", connector={"kvmosaic.load_failure_policy": "fail"})

    assert engine("full").scheduler.recompute_kv_load_failures
    assert not failing.scheduler.recompute_kv_load_failures
