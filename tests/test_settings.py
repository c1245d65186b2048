from pathlib import Path
from typing import Any

import pytest

from kvmosaic.errors import SettingsError
from kvmosaic.settings import (
    HttpAddress,
    ServerSettings,
    default_socket_path,
    parse_chunk_size,
    parse_http,
)

SOCKET = Path("/run/kvmosaic/server.sock")


def settings(**values: Any) -> ServerSettings:
    return ServerSettings(**{"l1_size_gb": 1.0, "socket": SOCKET, **values})


def test_the_size_alone_suffices() -> None:
    chosen = settings(l1_size_gb=100)
    assert chosen.l1_bytes == 100 << 30
    assert (chosen.chunk_size, chosen.eviction_policy, chosen.separate_object_groups) == (None, "LRU", True)
    assert chosen.http == HttpAddress("127.0.0.1", 9190)


def test_the_size_is_whole_mebibytes() -> None:
    assert settings(l1_size_gb=0.1001).l1_bytes == 102 << 20


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"l1_size_gb": 0}, ("--l1-size-gb 0", "from 0.015625 up")),
        ({"l1_size_gb": -5}, ("--l1-size-gb -5",)),
        ({"l1_size_gb": float("nan")}, ("--l1-size-gb nan",)),
        ({"l1_size_gb": float("inf")}, ("--l1-size-gb inf",)),
        ({"chunk_size": 0}, ("--chunk-size 0", "'auto'")),
        ({"eviction_policy": "lru"}, ("--eviction-policy 'lru'", "LRU")),
        ({"log_level": "loud"}, ("--log-level 'loud'", "debug, info")),
        ({"socket": Path("/" + "x" * 107)}, ("--socket", "108 bytes", "at most 107")),
        ({"exit_when_idle_s": -1}, ("--exit-when-idle-s -1", "0 or more")),
        ({"exit_when_idle_s": float("nan")}, ("--exit-when-idle-s nan",)),
    ],
)
def test_a_wrong_value_names_flag_value_and_fix(values: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError) as refused:
        settings(**values)
    for part in parts:
        assert part in str(refused.value)


def test_the_longest_socket_path_is_accepted() -> None:
    settings(socket=Path("/" + "x" * 106))


def test_each_user_has_a_socket_of_their_own() -> None:
    assert default_socket_path("/run/mine.sock", 7) == Path("/run/mine.sock")
    assert default_socket_path(None, 7) == default_socket_path("", 7) == Path("/tmp/kvmosaic-7/server.sock")


def test_a_chunk_size_is_auto_or_a_number() -> None:
    assert parse_chunk_size("auto") is None
    assert parse_chunk_size("784") == 784
    with pytest.raises(SettingsError, match="--chunk-size '2x'"):
        parse_chunk_size("2x")


def test_an_http_address_is_off_or_host_and_port() -> None:
    assert parse_http("off") is None
    assert parse_http("0.0.0.0:80") == HttpAddress("0.0.0.0", 80)
    assert parse_http("[::1]:80") == HttpAddress("::1", 80)
    assert str(HttpAddress("::1", 80)) == "[::1]:80"
    for wrong in ("", "80", "localhost", "host:", ":80", "host:x", "host:65536", "host:-1"):
        with pytest.raises(SettingsError, match="--http"):
            parse_http(wrong)
