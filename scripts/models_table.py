"""Writes the tables of docs/models.md from what the tests left in .cache/results.

    make test; python scripts/models_table.py

`render()` is the page; a test compares it with the committed one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / ".cache/results"
PAGE = ROOT / "docs/models.md"
PLANNERS = ("planner 0.32", "planner 0.33")

DENSE, WINDOWS, GEMMA4, SINKS = "Llama, Qwen2/3, Mistral", "Gemma 2 / Gemma 3", "Gemma 4", "gpt-oss"
GDN, LFM2, MAMBA2 = "Qwen3.5 / 3.6, Qwen3-Next", "LFM2", "Falcon-H1, Granite 4, Nemotron-H"
MLA, V4, V41 = "DeepSeek V2 / V3", "DeepSeek-V4-Flash", "DeepSeek-V4.1-Flash, GLM-5.3"
DSA, M3, KIMI = "GLM 5.1 / 5.2, DeepSeek V3.2", "MiniMax-M3", "Kimi-Linear / K3"

# Row: what it has, tiny models of real runs, geometries of the fuzzer.
ROWS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    DENSE: ("full", ("llama",), ("full", "full, two ranks", "full, blocks outside")),
    WINDOWS: ("window and full", ("gemma3",), ("window", "wide window", "narrow window", "window alone")),
    GEMMA4: ("window and full of other sizes, shared pages", ("gemma4",), ("two windows", "window")),
    SINKS: ("window and full", ("gpt-oss",), ("window", "wide window")),
    GDN: (
        "gated-delta-net state and full",
        ("qwen3-next", "qwen3.5"),
        ("state", "state, two ranks", "draft and state"),
    ),
    LFM2: ("short-convolution state and full", ("lfm2",), ("state",)),
    MAMBA2: ("Mamba2 state and full", (), ("state", "two states")),
    MLA: ("latents, the same on all ranks", ("deepseek-v2",), ("latent and indexer", "latent and indexer, two ranks")),
    V4: ("compressed latents, five page sizes", (), ("compressed",)),
    V41: ("the same, with groups that no prefix can use", (), ("compressed, replayed", "ring")),
    DSA: ("latents and an indexer", (), ("latent and indexer", "latent and indexer, two ranks")),
    M3: ("K/V and an indexer on some layers", (), ("latent and indexer",)),
    KIMI: ("KDA state and latents", (), ("state", "state, two ranks")),
}

HEAD = """# Models

Written by `python scripts/models_table.py` from the results of the tests; do not edit.

**real run**: a tiny model of this kind in vLLM, answers equal to the bit · **planner**: the real head counts and state
shapes through vLLM's own planners and allocation, every byte of pages, padding and other blocks checked after a store
and a load, in every page layout that vLLM plans (other layouts are refused); the number of cases per version of vLLM ·
**fuzzer**: random schedules over groups of these kinds.

| model | attention layout | real run | planner | fuzzer |
|---|---|---|---|---|
"""
CASES_HEAD = """
## What is planned

C is the chunk that kvmosaic takes, N the block that vLLM gives to all groups of a model with states. An object group
is written as kind, number of groups, and reach in chunks.

| case | ranks | page layouts | blocks | N | C | object groups |
|---|---|---|---|---|---|---|
"""


def render() -> str:
    found = {how: load(how) for how in (*PLANNERS, "real run", "fuzzer")}
    cases = {facts["name"]: facts for facts in found[PLANNERS[0]]}
    layouts: dict[str, list[str]] = {}
    for facts in found[PLANNERS[0]]:
        layouts.setdefault(facts["name"], []).append(facts["layout"])
    lines = [row_line(row, found) for row in ROWS]
    order = sorted(cases, key=lambda name: (list(ROWS).index(cases[name]["row"]), name))
    return HEAD + "".join(lines) + CASES_HEAD + "".join(case_line(cases[name], layouts[name]) for name in order)


def load(how: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((RESULTS / how).glob("*.json"))]


def row_line(row: str, found: dict[str, list[dict[str, Any]]]) -> str:
    layout, tiny, geometries = ROWS[row]
    runs, fuzzed = ({facts["name"] for facts in found[how]} for how in ("real run", "fuzzer"))
    counts = [len({facts["name"] for facts in found[how] if facts["row"] == row}) for how in PLANNERS]
    planned = ", ".join(
        f"{how.removeprefix('planner ')}: {count}" for how, count in zip(PLANNERS, counts, strict=True) if count
    )
    columns = (
        ", ".join(name for name in tiny if name in runs) or "-",
        planned or "-",
        " · ".join(name for name in geometries if name in fuzzed) or "-",
    )
    return f"| {row} | {layout} | {' | '.join(columns)} |\n"


def case_line(facts: dict[str, Any], layouts: list[str]) -> str:
    groups = [
        f"{each['kind']} × {each['groups']}, {'all' if each['reach'] is None else each['reach']}"
        for each in facts["object_groups"]
    ]
    if facts["skipped"]:
        groups.append(f"not kept × {facts['skipped']}")
    blocks = "/".join(map(str, facts["blocks"]))
    unified = facts["blocks"][0] if facts["state"] else "-"
    columns = (facts["name"], facts["ranks"], " ".join(sorted(layouts)), blocks, unified, facts["chunk_tokens"])
    return f"| {' | '.join(map(str, columns))} | {' · '.join(groups)} |\n"


if __name__ == "__main__":
    PAGE.write_text(render())
