"""The real server, one process a test."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from kvmosaic.testing.serving import wait_until

pytestmark = pytest.mark.slow

MIB = 1 << 20
BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "vllm", "transformers"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocker())
sys.argv[0] = "kvmosaic"
from kvmosaic.cli import main
main()
"""


class Server:
    """A server process that cannot import torch or vllm."""

    def __init__(self, path: Path, *flags: str) -> None:
        started = time.monotonic()
        self.path = path
        command = [sys.executable, "-c", BLOCKED, "server", "--socket", str(path), *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.ready_line = self.process.stdout.readline()
        self.start_s = time.monotonic() - started

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=10)
        return self.process.returncode, errors

    def memory_bytes(self, field: str) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split(f"{field}:")[1].split()[0]) << 10


Start = Callable[..., Server]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.sock"


@pytest.fixture
def start(path: Path) -> Iterator[Start]:
    servers: list[Server] = []

    def start(*flags: str, size_gb: str = "0.25", http: str = "off") -> Server:
        servers.append(Server(path, "--l1-size-gb", size_gb, "--http", http, *flags))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
        server.process.communicate()


def test_it_is_ready_within_a_second_without_torch_and_says_where(start: Start, path: Path) -> None:
    """The best of three: the machine may be busy."""
    times = []
    for _ in range(3):
        server = start()
        assert server.ready_line == f"kvmosaic server ready: socket={path} arena={256 * MIB} http=off\n"
        times.append(server.start_s)
        server.end()
    assert min(times) < 1.0


def test_it_is_small_beside_the_arena(start: Start) -> None:
    server = start(http="127.0.0.1:0")
    wait_until(lambda: server.memory_bytes("RssShmem") >= 256 * MIB)
    assert server.memory_bytes("RssAnon") + server.memory_bytes("RssFile") < 100 * MIB


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(start: Start, path: Path, number: int) -> None:
    server = start(http="127.0.0.1:0")
    assert path.is_socket()
    code, errors = server.end(number)
    assert code == 0
    assert "Traceback" not in errors
    assert not path.exists()


def test_it_ends_while_the_arena_is_still_being_made_resident(start: Start, path: Path) -> None:
    server = start(size_gb="8")
    code, _ = server.end()
    assert code == 0
    assert not path.exists()


def test_a_second_signal_ends_it_at_once(start: Start) -> None:
    server = start()
    server.process.send_signal(signal.SIGSTOP)
    server.process.send_signal(signal.SIGTERM)
    server.process.send_signal(signal.SIGINT)
    server.process.send_signal(signal.SIGCONT)
    assert server.wait()[0] == 1


def test_a_killed_servers_socket_is_taken_over(start: Start, path: Path) -> None:
    start().end(signal.SIGKILL)
    assert path.is_socket()
    assert "ready" in start().ready_line


@pytest.mark.parametrize("flags", [("--socket", "/" + "x" * 107), ("--l1-size-gb", "100000"), ("--l1-size-gb", "0")])
def test_a_setting_that_cannot_be_honoured_stops_the_start_in_one_line(start: Start, flags: tuple[str, str]) -> None:
    server = start(*flags)
    code, errors = server.wait()
    assert (code, server.ready_line) == (2, "")
    assert flags[0] in errors
    assert flags[1] in errors
    assert errors.startswith("kvmosaic: ")
    assert errors.count("\n") == 1


def test_a_running_servers_socket_is_refused(start: Start, path: Path) -> None:
    start()
    code, errors = start().wait()
    assert code == 2
    assert f"--socket {path} belongs to a running server" in errors
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_two_servers_that_start_at_once_do_not_both_run(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    command = [sys.executable, "-m", "kvmosaic", "server", "--l1-size-gb", "0.1", "--http", "off"]
    racers = [
        subprocess.Popen([*command, "--socket", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    wait_until(lambda: sum(racer.poll() is None for racer in racers) <= 1)
    losers = [racer for racer in racers if racer.poll() is not None]
    assert [racer.returncode for racer in losers] == [2, 2, 2]
    for racer in racers:
        racer.terminate()
        racer.communicate()
    assert not path.exists()


def test_a_taken_port_is_refused_and_leaves_no_socket(start: Start, path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, errors = start(http=address).wait()
    assert code == 2
    assert f"--http {address}" in errors
    assert not path.exists()


def test_nothing_of_it_is_in_dev_shm(start: Start) -> None:
    before = os.listdir("/dev/shm")
    server = start()
    assert os.listdir("/dev/shm") == before
    server.end(signal.SIGKILL)
    assert os.listdir("/dev/shm") == before


def test_http_answers_from_the_running_loop(start: Start) -> None:
    server = start(http="127.0.0.1:0")
    address = server.ready_line.split("http=")[1].strip()

    def answers() -> bool:
        try:
            return httpx.get(f"http://{address}/health", timeout=5).json()["status"] == "ok"
        except httpx.ConnectError:
            return False

    wait_until(answers)
    assert httpx.get(f"http://{address}/status").json()["pid"] == server.process.pid
    assert "kvmosaic_capacity_bytes 2.68435456e+08" in httpx.get(f"http://{address}/metrics").text


def test_an_idle_server_ends_when_told_to(start: Start, path: Path) -> None:
    server = start("--exit-when-idle-s", "0")
    assert server.wait()[0] == 0
    assert not path.exists()
