import os
import socket
import stat
from pathlib import Path

import pytest

from kvmosaic.errors import SettingsError
from kvmosaic.server.endpoint import Endpoint


def test_it_listens_for_its_owner_only_and_is_gone_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "new" / "s.sock"
    endpoint = Endpoint(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    endpoint.close()
    assert not path.exists()


def test_a_dead_servers_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    Endpoint(path).close()


def test_a_live_servers_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    live = Endpoint(path)
    with pytest.raises(SettingsError, match=r"--socket .* running server"):
        Endpoint(path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    live.close()


def test_a_live_server_whose_backlog_is_full_is_still_seen(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(0)
    waiting = socket.socket(socket.AF_UNIX)
    waiting.connect(str(path))
    with pytest.raises(SettingsError, match="running server"):
        Endpoint(path)
    waiting.close()
    listener.close()


def test_a_file_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    path.write_text("precious")
    with pytest.raises(SettingsError, match=r"--socket .* no socket"):
        Endpoint(path)
    assert path.read_text() == "precious"


def test_a_socket_that_another_server_has_by_now_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    first = Endpoint(path)
    path.rename(tmp_path / "moved")
    second = Endpoint(path)
    first.close()
    assert path.exists()
    second.close()
    assert not path.exists()


def test_a_directory_that_cannot_be_made_names_the_flag(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="--socket"):
        Endpoint(tmp_path / "file" / "s.sock")


@pytest.mark.skipif(os.getuid() != 0, reason="needs two users")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    with pytest.raises(SettingsError, match="uid 65534"):
        Endpoint(theirs / "s.sock")
