"""Divides the clauses of a run among machines, the same way on each of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from conformance.specification import Clause

DURATIONS = Path(__file__).resolve().parent / "durations.json"
"""Seconds per clause as once recorded at the standard budget; only their proportions matter."""

_UNKNOWN = 0.2


def shard_of(clauses: Sequence[Clause], index: int, count: int) -> list[Clause]:
    """The ``index``-th of ``count`` parts (from 1), balanced by recorded durations.

    Longest first, each to the part that has least so far; ties by id and part number, so that
    every machine computes the same division. The parts are disjoint and together complete.
    """
    recorded: dict[str, float] = (
        json.loads(DURATIONS.read_text(encoding="utf-8")) if DURATIONS.is_file() else {}
    )
    weights = {clause.id: recorded.get(clause.id, _UNKNOWN) for clause in clauses}
    loads = [0.0] * count
    owner: dict[str, int] = {}
    for identifier in sorted(weights, key=lambda one: (-weights[one], one)):
        part = loads.index(min(loads))
        owner[identifier] = part
        loads[part] += weights[identifier]
    return [clause for clause in clauses if owner[clause.id] == index - 1]
