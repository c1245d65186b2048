"""What tests found out about models, kept in .cache/results for the table that is rendered from it.

One file per fact, written when the test has passed and removed when it starts, so a failing test leaves none.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from kvmosaic.layout.groups import Geometry

FOLDER = Path(__file__).parents[1] / ".cache/results"


def forget(*names: str) -> None:
    _path(names).unlink(missing_ok=True)


def record(how: str, name: str, layout: str, row: str, geometry: Geometry) -> None:
    """A model of this row was found right in this layout."""
    cacheable = [group for group in geometry.groups if group.cacheable]
    object_groups = [
        {"kind": str(objects.kind), "groups": len(objects.groups), "reach": objects.reach_chunks}
        for objects in geometry.object_groups
    ]
    facts: dict[str, Any] = {
        "name": name,
        "row": row,
        "layout": layout,
        "ranks": geometry.world,
        "chunk_tokens": geometry.chunk_tokens,
        "blocks": sorted({group.block_tokens for group in cacheable}, reverse=True),
        "skipped": len(geometry.groups) - len(cacheable),
        "state": any(group.kind == "state" for group in cacheable),
        "object_groups": object_groups,
    }
    _write((how, name, layout), facts)


def record_name(how: str, name: str, passed: bool) -> None:
    """A model was, or was not, found right by all tests of one kind that ran."""
    if passed:
        _write((how, name), {"name": name})
    else:
        forget(how, name)


def _write(names: tuple[str, ...], facts: dict[str, Any]) -> None:
    path = _path(names)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts))


def _path(names: tuple[str, ...]) -> Path:
    how, *rest = names
    return FOLDER / how / (re.sub(r"[^a-z0-9]+", "-", " ".join(rest).lower()) + ".json")
