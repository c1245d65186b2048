"""Every test that the page of field reports names exists, and every line names one or says why there is none."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/field-reports.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def lines() -> list[str]:
    found = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [line for line in found if "| what looks for it |" not in line]


@cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED.findall(PAGE.read_text()))))
def test_the_named_test_exists(file: str, name: str) -> None:
    assert name.startswith("test_")
    assert name in functions_of(file)


def test_every_line_names_a_test_or_a_reason() -> None:
    assert len(lines()) > 50
    for line in lines():
        assert NAMED.search(line) or re.search(r"\b(yet|not served|no test|a fault of)\b", line), line
