"""From findings of tests to verdicts of clauses, profiles and the whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from conformance.errors import (
    EXIT_CONFORMS,
    EXIT_DOES_NOT_CONFORM,
    EXIT_SUITE_FAILED,
)
from conformance.expectations import Expectation
from conformance.specification.model import LEVELS, Clause

VERDICTS = (
    "error",
    "crash",
    "timeout",
    "fail",
    "inconclusive",
    "unexpected-pass",
    "expected-fail",
    "pass",
    "unsupported",
    "not-applicable",
    "not-run",
)
"""Worst first: a clause with several tests has the worst of their verdicts."""

_AGAINST = {"crash", "timeout", "fail", "inconclusive", "unexpected-pass"}
"""What counts against conformance."""

_EXPECTABLE = {"fail", "crash", "timeout"}


def clause_result(
    clause: Clause,
    findings: Iterable[Mapping[str, Any]],
    *,
    edition: str,
    device: str,
    missing: str | None,
    expectation: Expectation | None,
    complete: bool,
) -> dict[str, Any]:
    """The result of one clause. ``missing`` is why the candidate cannot be graded on it."""
    findings = sorted(findings, key=lambda finding: finding["test"])
    verdict, message = _verdict(clause, findings, edition, device, missing, complete)
    worst = next((f for f in findings if f["verdict"] == verdict), None)
    exception = worst["exception"] if worst else None
    if expectation is not None:
        if verdict == "pass":
            verdict = "unexpected-pass"
            message = f"passes, but is recorded as failing: {expectation.reason}"
        elif verdict in _EXPECTABLE:
            if expectation.exception in (None, exception):
                verdict = "expected-fail"
                message = f"{expectation.reason} — {message}"
            else:
                message = f"recorded with {expectation.exception}, observed {message}"
    return {
        "clause": clause.id,
        "level": clause.level,
        "profile": clause.profile,
        "verdict": verdict,
        "silent": bool(worst and worst["silent"]),
        "message": message,
        "examples": sum(finding["examples"] for finding in findings),
        "seconds": round(sum(finding["seconds"] for finding in findings), 4),
        "repro": worst.get("repro") if worst else None,
        "tests": [
            {key: finding[key] for key in ("test", "verdict", "message", "examples", "seconds")}
            | ({"details": finding["details"]} if finding.get("details") else {})
            for finding in findings
        ],
    }


def _verdict(
    clause: Clause,
    findings: list[Mapping[str, Any]],
    edition: str,
    device: str,
    missing: str | None,
    complete: bool,
) -> tuple[str, str]:
    if not clause.applies_to(edition):
        since = f"since {clause.since}" + (f" until {clause.until}" if clause.until else "")
        return "not-applicable", f"holds {since}, graded is edition {edition}"
    if clause.testable == "no":
        return "not-applicable", "obliges the caller, not the implementation"
    if clause.testable != device and clause.testable != "cpu":
        return "not-applicable", f"needs {clause.testable}, graded is {device}"
    if missing is not None:
        return "unsupported", missing
    if not findings:
        if not complete:
            return "not-run", "the run ended before this clause"
        return "error", "no test of this clause ran"
    worst = min(findings, key=lambda finding: VERDICTS.index(finding["verdict"]))
    return worst["verdict"], worst["message"]


def profile_status(results: Iterable[Mapping[str, Any]]) -> str:
    """``conforms``, ``partial``, ``unsupported`` or ``not-run`` of the results of one profile."""
    verdicts = [result["verdict"] for result in results if result["verdict"] != "not-applicable"]
    if not verdicts or all(verdict == "not-run" for verdict in verdicts):
        return "not-run"
    if all(verdict == "unsupported" for verdict in verdicts):
        return "unsupported"
    if all(verdict in ("pass", "expected-fail") for verdict in verdicts):
        return "conforms"
    return "partial"


def summarise(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts per level (never mixed) and a status per profile."""
    levels: dict[str, dict[str, int]] = {}
    for level in LEVELS:
        counts: dict[str, int] = {}
        for result in results:
            if result["level"] == level:
                counts[result["verdict"]] = counts.get(result["verdict"], 0) + 1
        levels[level.lower()] = dict(sorted(counts.items(), key=lambda i: VERDICTS.index(i[0])))
    profiles: dict[str, dict[str, str]] = {}
    for result in results:
        profiles.setdefault(result["profile"], {})
    for profile in profiles:
        mine = [result for result in results if result["profile"] == profile]
        profiles[profile] = {"status": profile_status(mine)}
    return {"levels": levels, "profiles": profiles}


def conclude(
    results: list[dict[str, Any]], *, level: str, declared: Iterable[str]
) -> tuple[str, int]:
    """The verdict of the whole and the exit code. ``level`` is the lowest that decides."""
    deciding = LEVELS[: LEVELS.index(level.upper()) + 1]
    declared = set(declared)
    if any(r["verdict"] in _AGAINST and r["level"] in deciding for r in results):
        # Shown to be wrong, whatever else could not be shown. (A candidate that never recomputes
        # keeps many tests from reaching what they ask about.)
        return "does-not-conform", EXIT_DOES_NOT_CONFORM
    if any(result["verdict"] == "error" for result in results):
        return "suite-error", EXIT_SUITE_FAILED
    if any(result["verdict"] == "not-run" for result in results):
        return "incomplete", EXIT_DOES_NOT_CONFORM
    unsupported = [r for r in results if r["verdict"] == "unsupported" and r["level"] in deciding]
    if any(not r["message"].startswith("declared unsupported") for r in unsupported):
        return "does-not-conform", EXIT_DOES_NOT_CONFORM
    if unsupported or declared:
        return "partial", EXIT_CONFORMS
    return "conforms", EXIT_CONFORMS
