import socket
from concurrent.futures import Future

import httpx
import pytest
from starlette.testclient import TestClient

from kvmosaic.errors import SettingsError
from kvmosaic.server import admin
from kvmosaic.settings import HttpAddress
from kvmosaic.testing.serving import wait_until
from tests.server.kit import declaration, make_service, mapped_worker, scheduler
from tests.server.test_service import lookup, store


def report() -> admin.Report:
    service = make_service()
    mapped_worker(service, declaration(model="a model"))
    asks = scheduler(service)
    epoch = asks.attach().epoch
    store(asks, epoch, 3)
    asks.ask(lookup(epoch, 2))
    return service.report()


def answered(value: admin.Report) -> admin.AskReport:
    def ask() -> Future[admin.Report]:
        future: Future[admin.Report] = Future()
        future.set_result(value)
        return future

    return ask


@pytest.fixture
def numbers() -> admin.Report:
    return report()


def test_status_is_the_report(numbers: admin.Report) -> None:
    reply = TestClient(admin.build_app(answered(numbers))).get("/status")
    assert reply.status_code == 200
    assert reply.json() == numbers


def test_health_names_the_boot(numbers: admin.Report) -> None:
    reply = TestClient(admin.build_app(answered(numbers))).get("/health")
    assert reply.json() == {"status": "ok", "boot_id": numbers["boot_id"], "uptime_s": 0.0}


def test_a_loop_that_does_not_answer_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "SNAPSHOT_TIMEOUT_S", 0.01)
    client = TestClient(admin.build_app(Future))
    for path in ("/health", "/status", "/metrics"):
        assert client.get(path).status_code == 503


def test_metrics_are_the_reports_numbers(numbers: admin.Report) -> None:
    lines = TestClient(admin.build_app(answered(numbers))).get("/metrics").text.splitlines()
    namespace = numbers["models"][0]["namespace"]
    for line in (
        "kvmosaic_objects 3.0",
        "kvmosaic_leases 1.0",
        "kvmosaic_committed_objects_total 3.0",
        f'kvmosaic_model_objects{{model="a model",namespace="{namespace}"}} 3.0',
        f'kvmosaic_model_lookups_total{{model="a model",namespace="{namespace}"}} 1.0',
    ):
        assert line in lines, line
    assert "# TYPE kvmosaic_committed_objects_total counter" in lines
    assert not any(line.startswith("kvmosaic_pid") for line in lines)


def test_a_taken_port_names_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"--http 127.0.0.1:{port}"):
            admin.bind(HttpAddress("127.0.0.1", port))


def test_it_serves_on_its_own_thread_and_ends(numbers: admin.Report) -> None:
    listener = admin.bind(HttpAddress("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = admin.Admin(listener, answered(numbers))
    server.start()
    assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code == 200
    server.stop()

    def refused() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) != 0

    wait_until(refused)
