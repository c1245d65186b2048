"""Keeps what the tests of models find out, for the table of models, and runs the test of that table last."""

from __future__ import annotations

import pytest

from tests.results import record_name

ENGINE, FUZZER = "tests/engine/test_reuse.py", "tests/testing/test_fuzz.py::test_a_hundred_schedules"
_outcomes: dict[tuple[str, str], bool] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped or not report.nodeid.startswith((ENGINE, FUZZER)):
        return
    for found in _models_of(report.nodeid):
        _outcomes[found] = _outcomes.get(found, True) and report.passed


def pytest_sessionfinish() -> None:
    for (how, name), passed in _outcomes.items():
        record_name(how, name, passed)


def _models_of(nodeid: str) -> list[tuple[str, str]]:
    """Which models a test is about: the tiny one of a real engine, or all that the fuzzer draws from."""
    if nodeid.startswith(FUZZER):
        from kvmosaic.testing.geometries import GEOMETRIES  # needs vLLM, as the test does

        return [("fuzzer", name) for name in GEOMETRIES]
    from tests.engine.test_reuse import MODELS

    parameters = nodeid.partition("[")[2].rstrip("]")
    return [("real run", name) for name in MODELS if parameters == name or parameters.startswith(f"{name}-")]
