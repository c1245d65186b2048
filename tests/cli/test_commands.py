import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmosaic import cli
from kvmosaic.testing.serving import ServerProcess

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("server") / "s.sock", 0.1)
    yield server
    server.close()


class Kvmosaic:
    """The command line in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr("sys.argv", ["kvmosaic", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = self._capsys.readouterr()
        return int(ended.value.code or 0), out, err


@pytest.fixture
def kvmosaic(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kvmosaic:
    monkeypatch.delenv("KVMOSAIC_SOCKET", raising=False)
    return Kvmosaic(monkeypatch, capsys)


def report(text: str) -> dict[str, Any]:
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def test_status_as_json_has_the_numbers_that_scripts_need(kvmosaic: Kvmosaic, server: ServerProcess) -> None:
    code, out, _ = kvmosaic("status", "--socket", str(server.socket), "--json")
    assert code == 0
    numbers = report(out)
    names = ("objects", "object_bytes", "capacity_bytes", "leases", "reservations", "sessions", "quarantined")
    assert all(type(numbers[name]) is int for name in names)
    assert numbers["models"] == []
    assert numbers["pid"] == server.process.pid


def test_status_for_people_is_a_table(kvmosaic: Kvmosaic, server: ServerProcess) -> None:
    code, out, _ = kvmosaic("status", "--socket", str(server.socket))
    assert code == 0
    assert "objects" in out
    assert "107.0 MB" in out


def test_clear_says_how_much_it_forgot(kvmosaic: Kvmosaic, server: ServerProcess) -> None:
    assert kvmosaic("clear", "--socket", str(server.socket)) == (0, "0 objects forgotten\n", "")


def test_clear_of_an_unknown_model_says_which_are_known(kvmosaic: Kvmosaic, server: ServerProcess) -> None:
    code, _, err = kvmosaic("clear", "--socket", str(server.socket), "--model", "x")
    assert code == 2
    assert "model 'x' is not here; known models: none" in err


def test_the_socket_may_come_from_the_environment(
    kvmosaic: Kvmosaic, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMOSAIC_SOCKET", str(server.socket))
    assert kvmosaic("status", "--json")[0] == 0


def test_without_a_server_one_line_says_where_it_was_looked_for(
    kvmosaic: Kvmosaic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMOSAIC_SOCKET", str(tmp_path / "nobody.sock"))
    for command in ("status", "clear"):
        code, out, err = kvmosaic(command)
        assert (code, out) == (2, "")
        assert str(tmp_path / "nobody.sock") in err
        assert err.count("\n") == 1


def test_a_wrong_flag_value_is_refused_by_name(kvmosaic: Kvmosaic, tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    for flag, value in (("--chunk-size", "2x"), ("--http", "x"), ("--eviction-policy", "FIFO"), ("--log-level", "x")):
        code, _, err = kvmosaic("server", "--l1-size-gb", "1", "--socket", path, flag, value)
        assert code == 2
        assert flag in err
        assert value in err


def test_the_seeds_flags_are_known(kvmosaic: Kvmosaic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = kvmosaic("server", "--help")
    assert code == 0
    for flag in (
        "--chunk-size",
        "--l1-size-gb",
        "--eviction-policy",
        "--separate-object-groups",
        "--no-separate-object-groups",
    ):
        assert flag in out
