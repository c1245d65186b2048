"""The table of models says what the tests found, no more and no less."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("models_table", ROOT / "scripts/models_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.last
def test_the_page_is_what_the_results_render(table: ModuleType) -> None:
    missing = [how for how in (*table.PLANNERS, "real run", "fuzzer") if not table.load(how)]
    if missing:
        pytest.skip(f"there are no results of {', '.join(missing)} yet; make test leaves them")
    assert table.PAGE.read_text() == table.render(), "run: python scripts/models_table.py"


def test_every_model_that_only_planners_can_show_is_there(table: ModuleType) -> None:
    from tests.engines.vllm.rows import CASES

    assert {case.row for case in CASES.values()} == set(table.ROWS)
    page = table.PAGE.read_text()
    for name, case in CASES.items():
        assert f"| {name} | {len(case.model.specs)} | {' '.join(sorted(case.served))} |" in page, name
    for line in page.partition("## What is planned")[0].splitlines():
        if line.startswith(tuple(f"| {row} |" for row in table.ROWS)):
            assert "0.32: " in line
            assert "0.33: " in line


def test_a_result_that_is_missing_shows(table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    assert table.render() != table.PAGE.read_text()
