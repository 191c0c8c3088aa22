"""What changed between two runs, and whether any of it is a regression."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from conformance.errors import UsageError

_GOOD = ("pass", "expected-fail")
_BAD = ("fail", "crash", "timeout", "error", "unexpected-pass")

KINDS = {
    "regression": "passed before, does not now",
    "fixed": "did not pass before, does now",
    "still-failing": "fails in both",
    "new": "graded in the new run only",
    "gone": "graded in the base run only",
    "inconclusive": "at least one side says nothing",
    "other": "changed between verdicts that are neither good nor bad",
}


@dataclass
class Comparison:
    """Differences by kind; each is (clause, level, base verdict, new verdict, message)."""

    kinds: dict[str, list[tuple[str, str, str, str, str]]] = field(
        default_factory=lambda: {kind: [] for kind in KINDS}
    )

    @property
    def regressed(self) -> bool:
        """Whether anything got worse."""
        return bool(self.kinds["regression"])


def compare_documents(
    base: dict[str, Any], new: dict[str, Any], *, force: bool = False
) -> Comparison:
    """Compare two runs clause by clause.

    Raises UsageError for runs that measure different things (specification, edition, torch,
    device, budget) unless ``force``: their differences would say nothing about the candidate.
    """
    if not force and (unlike := _unlike(base, new)):
        raise UsageError(f"unlike runs ({'; '.join(unlike)}); --force compares them all the same")
    before = {result["clause"]: result for result in base["results"]}
    after = {result["clause"]: result for result in new["results"]}
    comparison = Comparison()
    for clause in dict.fromkeys([*before, *after]):
        one, other = before.get(clause), after.get(clause)
        kind = _kind(one and one["verdict"], other and other["verdict"])
        if kind is None:
            continue
        shown: dict[str, Any] = other or one or {}
        comparison.kinds[kind].append(
            (
                clause,
                shown["level"],
                one["verdict"] if one else "-",
                other["verdict"] if other else "-",
                " ".join(shown["message"].split()),
            )
        )
    return comparison


def _kind(before: str | None, after: str | None) -> str | None:
    if before is None:
        return "new"
    if after is None:
        return "gone"
    if "inconclusive" in (before, after) or "not-run" in (before, after):
        return None if before == after else "inconclusive"
    if before in _GOOD and after not in _GOOD:
        # Support that is lost is a regression too: the clause held and is not shown to hold now.
        return "regression"
    if before not in _GOOD and after in _GOOD:
        return "fixed"
    if before in _BAD and after in _BAD:
        return "still-failing"
    return None if before == after or (before in _GOOD and after in _GOOD) else "other"


def _unlike(base: dict[str, Any], new: dict[str, Any]) -> list[str]:
    pairs = {
        "suite": (base["suite"]["version"], new["suite"]["version"]),
        "specification": (base["spec"]["digest"], new["spec"]["digest"]),
        "edition": (base["spec"]["edition"], new["spec"]["edition"]),
        "torch": (base["environment"]["torch"], new["environment"]["torch"]),
        "device": (base["environment"]["device"], new["environment"]["device"]),
        "budget": (base["settings"]["budget"], new["settings"]["budget"]),
    }
    return [f"{name}: {one} and {other}" for name, (one, other) in pairs.items() if one != other]


def as_markdown(comparison: Comparison) -> str:
    """One table per kind that occurs; text of candidates is escaped."""
    from conformance.report.markdown import escape

    lines: list[str] = []
    for kind, rows in comparison.kinds.items():
        if not rows:
            continue
        lines += [f"## {kind} ({len(rows)}): {KINDS[kind]}", ""]
        lines += ["| clause | level | base | new | message |", "|---|---|---|---|---|"]
        lines += ["| " + " | ".join(escape(cell)[:300] for cell in row) + " |" for row in rows]
        lines.append("")
    return "\n".join(lines) if lines else "No difference.\n"
