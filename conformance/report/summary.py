"""What every rendering says first, computed once."""

from __future__ import annotations

from typing import Any

from conformance.specification.model import LEVELS, PROFILES

_AGAINST = ("error", "crash", "timeout", "fail", "inconclusive", "unexpected-pass")


def against(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Results that count against conformance or against the suite, MUST first."""
    rows = [r for r in document["results"] if r["verdict"] in _AGAINST]
    return sorted(rows, key=lambda r: (LEVELS.index(r["level"]), _AGAINST.index(r["verdict"])))


def verdict_line(document: dict[str, Any]) -> str:
    """One sentence that says what the run found."""
    counts = document["summary"]["levels"]["must"]
    graded = sum(
        n for verdict, n in counts.items() if verdict not in ("not-applicable", "unsupported")
    )
    passed = counts.get("pass", 0)
    recorded = counts.get("expected-fail", 0)
    sentence = {
        "conforms": "Conforms",
        "partial": "Conforms in part: some profiles are declared unsupported",
        "does-not-conform": "Does not conform",
        "incomplete": "The run ended early; nothing is proved",
        "suite-error": "The suite itself failed; see the verdicts `error`",
    }[document["summary"]["verdict"]]
    extra = f", {recorded} recorded faults" if recorded else ""
    return f"{sentence}: {passed} of {graded} MUST clauses pass{extra}."


def level_rows(document: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Verdicts that occur, and one row of counts per level."""
    levels = document["summary"]["levels"]
    columns = list(dict.fromkeys(verdict for counts in levels.values() for verdict in counts))
    rows = [
        [level, *(str(levels[level.lower()].get(column, 0)) for column in columns)]
        for level in LEVELS
    ]
    return columns, rows


def profile_rows(document: dict[str, Any]) -> list[list[str]]:
    """Profile, status, clauses passed, clauses graded."""
    rows = []
    for profile in PROFILES:
        entry = document["summary"]["profiles"].get(profile)
        if entry is None:
            continue
        mine = [
            r
            for r in document["results"]
            if r["profile"] == profile and r["verdict"] != "not-applicable"
        ]
        passed = sum(r["verdict"] == "pass" for r in mine)
        rows.append([profile, entry["status"], str(passed), str(len(mine))])
    return rows
