"""The fuzzer catches every planted fault; the list is in docs/correctness.md."""

from __future__ import annotations

import pytest

from tests.mutations.hunt import DOCUMENT, hunt, section_of
from tests.mutations.planted import FAULTS

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM warns of what this machine lacks


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str) -> None:
    assert hunt(FAULTS[name]) is not None


def test_the_documentation_lists_every_fault() -> None:
    section = section_of(DOCUMENT.read_text())
    assert [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")][1:] == list(FAULTS)
