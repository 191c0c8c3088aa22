"""The run as Markdown, short enough for a CI job summary."""

from __future__ import annotations

import html
from typing import Any

from conformance.report.summary import against, level_rows, profile_rows, verdict_line
from conformance.specification import Specification

_MOST = 50
"""Failures listed in full; a candidate that fails everywhere needs no wall of text."""


def escape(text: str) -> str:
    """Text of a candidate, safe inside a Markdown table: no markup, no new cell or line."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|").replace("`", "'")


def render_markdown(document: dict[str, Any], specification: Specification) -> str:
    """Verdict, counts per level, status per profile, and what counts against conformance."""
    candidate, environment = document["candidate"], document["environment"]
    lines = [
        f"# {escape(candidate['name'])}: {document['summary']['verdict']}",
        "",
        verdict_line(document),
        "",
        f"Edition {document['spec']['edition']}, version {escape(str(candidate['version']))}, "
        f"torch {escape(environment['torch'])}, Python {environment['python']}, "
        f"{environment['device']}; budget {document['settings']['budget']}, "
        f"seed {document['settings']['seed']}"
        + ("." if document["complete"] else "; **the run is not complete**."),
        "",
    ]
    columns, rows = level_rows(document)
    lines += _table(["level", *columns], rows)
    lines += _table(["profile", "status", "passed", "of"], profile_rows(document))
    failing = against(document)
    if failing:
        lines += ["## What counts against it", ""]
        for result in failing[:_MOST]:
            clause = specification.by_id.get(result["clause"])
            title = f": {clause.title}" if clause else ""
            silent = ", silently wrong" if result["silent"] else ""
            lines.append(
                f"- **{result['clause']}** ({result['level']}, {result['verdict']}{silent})"
                f"{escape(title)}. {escape(result['message'])[:400]}"
            )
        if len(failing) > _MOST:
            lines.append(f"- … and {len(failing) - _MOST} more, see report.json")
        lines.append("")
    recorded = [r for r in document["results"] if r["verdict"] == "expected-fail"]
    if recorded:
        lines += ["## Recorded faults", ""]
        lines += [f"- **{r['clause']}**: {escape(r['message'])[:400]}" for r in recorded]
        lines.append("")
    return "\n".join(lines)


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(escape(cell) for cell in row) + " |" for row in rows]
    return [*lines, ""]
